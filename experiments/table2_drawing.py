"""Table 2 and its curves, from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import METHOD_COLORS, new_figure, save_figure
from experiments.summaries import mark_long_solves, mean_and_deviation, paired_p_value, write_markdown
from experiments.table2 import METHODS, NUM_POINTS, TASKS, WIDTHS

# Barriers of the paper's Table 2 (mean over 50 pairs), to set ratios beside.
PAPER = {
    "naive": {"Pol1": 0.62, "Pol3": 0.58, "MNIST": 1.07, "CIFAR-10": 1.23},
    "wm": {"Pol1": 0.32, "Pol3": 0.41, "MNIST": 0.03, "CIFAR-10": 0.27},
    "l2": {"Pol1": 0.10, "Pol3": 0.12, "MNIST": 0.02, "CIFAR-10": 0.19},
    "ste": {"Pol1": 0.23, "Pol3": 0.24, "MNIST": 0.01, "CIFAR-10": 0.15},
    "mid": {"Pol1": 0.07, "Pol3": 0.17, "MNIST": 0.00, "CIFAR-10": 0.05},
    "rnd": {"Pol1": 0.03, "Pol3": 0.03, "MNIST": 0.01, "CIFAR-10": 0.06},
}
COMPARED = ("naive", "wm", "ste", "l2", "mid", "rnd")
"""Methods that stand beside those that ran on the first pairs alone."""
DESCENTS = ("l2", "l2-plain", "mid", "rnd")
"""Methods that descend with the implicit gradient."""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


class Cells:
    """All trials of a method on a column, their pairs in order."""

    def __init__(self, records: list[dict[str, Any]]):
        self._records = sorted(records, key=lambda record: record["config"]["first"])

    def records(self, task: str, method: str, width: int | None = None) -> list[dict[str, Any]]:
        """The records of a cell, or of all widths, in the order of their pairs."""
        wanted = {"task": task, "method": method, **({} if width is None else {"width": width})}
        return [r for r in self._records if all(r["config"][k] == v for k, v in wanted.items())]

    def cell(self, task: str, width: int, method: str) -> list[dict[str, Any]]:
        """The results of a cell, in the order of their pairs."""
        return [record["result"] for record in self.records(task, method, width)]

    def label(self, task: str, method: str, width: int | None = None) -> str:
        """The name of a row, with a mark if it has descents that were run otherwise than today."""
        label, records = METHODS[method], self.records(task, method, width)
        return mark_long_solves(label, records) if method.removeprefix("wm+") in DESCENTS else label

    def values(self, task: str, width: int, method: str, split: str, what: str) -> list[float]:
        """A number of every pair."""
        return [v for result in self.cell(task, width, method) for v in result[split][what]]

    def seconds(self, task: str, width: int, method: str, count: int) -> list[float]:
        """What each of the first pairs took, by the mean of its trial."""
        results = self.cell(task, width, method)
        return [result["seconds_each"] for result in results for _ in result["train"]["barrier"]][:count]

    def curve(self, task: str, width: int, method: str, split: str, what: str) -> list[float]:
        """A mean curve over all pairs."""
        results = self.cell(task, width, method)
        counts = [len(result[split]["barrier"]) for result in results]
        return np.average([result[split][what] for result in results], axis=0, weights=counts).tolist() if results else []


def draw_all(records: list[dict[str, Any]], folder: Path) -> None:
    """The table of every column, the strip of widths, and the curves."""
    cells = Cells(records)
    tables: list[Table] = []
    for task in TASKS:
        width = TASKS[task].widths[1]
        if cells.cell(task, width, "naive"):
            tables += _columns(cells, task, width)
    tables += [_strip(cells, task) for task in ("MNIST", "CIFAR-10") if cells.cell(task, 512, "naive")]
    verdicts = [_verdict(cells, task) for task in TASKS if cells.cell(task, TASKS[task].widths[1], "naive")]
    write_markdown(folder / "table2.md", "Table 2: linear mode connectivity", tables, records, verdicts)
    _draw_curves(cells, folder)


def _verdict(cells: Cells, task: str) -> str:
    """The method with the lowest mean test barrier of a column, among those that have all of its pairs."""
    found = {method: cells.values(task, TASKS[task].widths[1], method, "test", "barrier") for method in METHODS}
    naive = np.mean(found.pop("naive"))
    most = max((len(values) for values in found.values()), default=0)
    means = {method: float(np.mean(values)) for method, values in found.items() if most and len(values) == most}
    if not means:
        return f"{task}: nothing was run beside the networks as they are."
    best = min(means, key=lambda method: means[method])
    others = f"of the {len(means)} methods with {most} pairs"
    ratio = f"{means[best] / naive:.3f} of the naive one"
    return f"{task}: the lowest mean test barrier {others} is that of {METHODS[best]}, {ratio}."


def _columns(cells: Cells, task: str, width: int) -> list[Table]:
    """A table of the methods that have all pairs; for those that have the first ones alone, one beside ours on the same."""
    found = {method: len(cells.values(task, width, method, "train", "barrier")) for method in METHODS}
    counts = sorted({count for count in found.values() if count}, reverse=True)
    return [
        _column(cells, task, width, count, [m for m, n in found.items() if n == count or (n > count and m in COMPARED)])
        for count in counts
    ]


def _column(cells: Cells, task: str, width: int, count: int, methods: Sequence[str]) -> Table:
    """Some methods on the first pairs."""
    naive = {split: cells.values(task, width, "naive", split, "barrier")[:count] for split in ("train", "test")}
    rows = []
    for method in methods:
        row = [cells.label(task, method, width)]
        for split in ("train", "test"):
            barrier = cells.values(task, width, method, split, "barrier")[:count]
            row += [
                mean_and_deviation(barrier),
                f"{np.mean(barrier) / np.mean(naive[split]):.3f}",
                mean_and_deviation(cells.values(task, width, method, split, "auc")[:count]),
            ]
        train = cells.values(task, width, method, "train", "barrier")[:count]
        for other in ("wm", "ste"):
            reference = cells.values(task, width, other, "train", "barrier")[:count]
            same = _are_same_networks(cells, task, width, method, other, count)
            row.append(f"{paired_p_value(train, reference):.1g}" if same else "")
        accuracy = cells.values(task, width, method, "test", "middle_accuracy")[:count]
        seconds = np.mean(cells.seconds(task, width, method, count))
        paper = f"{PAPER[method][task] / PAPER['naive'][task]:.3f}" if method in PAPER else ""
        row += [mean_and_deviation(accuracy) if accuracy else "", f"{seconds:.2f}", paper]
        rows.append(row)
    ends = {s: np.mean(cells.values(task, width, "naive", s, "ends")[:count]) for s in ("train", "test")}
    pairs = "1 pair" if count == 1 else f"{count} pairs"
    header = [
        f"{task}, width {width}, {pairs}; ends: {ends['train']:.3f} train, {ends['test']:.3f} test",
        "train barrier", "/ naive", "train AUC", "test barrier", "/ naive", "test AUC",
        "p, as WM", "p, as STE", "midpoint accuracy", "seconds per pair", "paper's / naive",
    ]  # fmt: skip
    return header, rows


def _are_same_networks(cells: Cells, task: str, width: int, method: str, other: str, count: int) -> bool:
    """Whether two rows began from the same networks, by the losses of their ends: other machines train other networks."""
    ends, others = (np.array(cells.values(task, width, each, "test", "ends"))[:count] for each in (method, other))
    return ends.shape == others.shape and np.allclose(ends, others, rtol=1e-3, atol=1e-4)


def _strip(cells: Cells, task: str) -> Table:
    rows = []
    for method in METHODS:
        row = []
        for width in WIDTHS:
            pair = [cells.values(task, width, method, split, "barrier")[:10] for split in ("train", "test")]
            row.append(" / ".join(f"{np.mean(values):.4f}" for values in pair) if pair[0] else "")
        if any(row[1:]):
            rows.append([cells.label(task, method), *row])
    return [f"{task}: barrier on train / test, first ten pairs", *[f"width {w}" for w in WIDTHS]], rows


def _draw_curves(cells: Cells, folder: Path) -> None:
    """The mean curve of every method: the loss of each column, the accuracy of the classifications."""
    figure, axes = new_figure(2, 3, width=12, height=6.4)
    panels = [
        ("Pol1", "loss"),
        ("MNIST", "loss"),
        ("MNIST", "accuracy"),
        ("Pol3", "loss"),
        ("CIFAR-10", "loss"),
        ("CIFAR-10", "accuracy"),
    ]
    weights = np.linspace(0, 1, NUM_POINTS)
    for ax, (task, what) in zip(axes.flat, panels, strict=True):
        width = TASKS[task].widths[1]
        for method in ("naive", "wm", "activation", "ste", "l2", "mid", "rnd"):
            curve = cells.curve(task, width, method, "train", "mean_losses" if what == "loss" else "mean_accuracies")
            if curve:
                style = {"linestyle": "--"} if method == "naive" else {}
                ax.plot(weights, curve, color=METHOD_COLORS[method], label=METHODS[method], **style)
        ax.set(title=f"{task}: {what} on training data", xlabel="weight of the permuted network")
        if what == "loss" and task != "CIFAR-10":
            ax.set_yscale("log")  # the aligned curves lie far below the naive one
    if axes[0, 0].lines:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    save_figure(figure, folder / "table2-curves")
