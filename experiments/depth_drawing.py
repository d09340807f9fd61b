"""Tables and figures of the deep networks, from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.depth import METHODS, NETWORKS
from experiments.figures import METHOD_COLORS, new_figure, save_figure
from experiments.summaries import mark_long_solves, write_markdown
from onebasin.landscape.paths import LinearPath

COLORS = {**METHOD_COLORS, "wm+mid": "C5", "am": "C6", "auto": "C7", "am+scales": "C8", "l2+scales": "C9"}
DESCENTS = ("l2", "mid", "wm+mid")
"""Methods that descend with the implicit gradient."""


def path_of(record: dict[str, Any], kind: str, split: str) -> LinearPath:
    """The loss of a record along the line: plain or repaired, train or test."""
    curve = record["result"][kind]
    return LinearPath(curve["weights"], {"loss": curve[f"{split} loss"], "accuracy": curve[f"{split} accuracy"]})


def draw_all(records: list[dict[str, Any]], folder: Path) -> None:
    """A table of all networks, the curves of VGG11 and VGG19, barrier and AUC by depth."""
    tables = []
    for network in NETWORKS:
        rows = []
        for method, label in METHODS.items():
            chosen = [r for r in records if r["config"]["network"] == network and r["config"]["method"] == method]
            if chosen:
                label = mark_long_solves(label, chosen) if method in DESCENTS else label
                rows.append([label, *_row(chosen)])
        if rows:
            header = [network, "test barrier", "test AUC", "midpoint accuracy", "train barrier"]
            header += [f"{name}, repaired" for name in header[1:]]
            tables.append(([*header, "units moved", "seconds"], rows))
    verdicts = [
        _verdict(network, records) for network in NETWORKS if any(r["config"]["network"] == network for r in records)
    ]
    write_markdown(folder / "depth.md", "Deep networks on CIFAR-10", tables, records, verdicts)
    _draw_vgg_curves(records, folder)
    _draw_by_depth(records, folder)


def _verdict(network: str, records: list[dict[str, Any]]) -> str:
    """The method with the best midpoint of a network, statistics corrected, among those that have most pairs."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["config"]["network"] == network:
            path = path_of(record, "repaired", "test")
            found.setdefault(record["config"]["method"], []).append(path.metrics["accuracy"][len(path.weights) // 2])
    most = max(map(len, found.values()))
    means = {method: float(np.mean(values)) for method, values in found.items() if len(values) == most}
    best = max(means, key=lambda method: means[method])
    among = f"best of the {len(means)} methods with {most} pair{'' if most == 1 else 's'}"
    return f"{network}: {among}, at the repaired midpoint: {METHODS[best]}, {100 * means[best]:.1f} % on test data."


def _row(chosen: list[dict[str, Any]]) -> list[str]:
    row = []
    for kind in ("plain", "repaired"):
        tests = [path_of(r, kind, "test") for r in chosen]
        middle = [path.metrics["accuracy"][len(path.weights) // 2] for path in tests]
        row += [_each([path.barrier for path in tests]), _each([path.auc for path in tests]), _each(middle)]
        row.append(_each([path_of(r, kind, "train").barrier for r in chosen]))
    row.append(f"{np.mean([r['result']['moved'] for r in chosen]):.0%}")
    return [*row, _each([r["result"]["seconds"] for r in chosen], digits=2)]


def _each(values: list[float], digits: int = 3) -> str:
    """A few pairs are too few for a deviation: show each."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _draw_vgg_curves(records: list[dict[str, Any]], folder: Path) -> None:
    """Loss and accuracy of the first pair along the line; dotted, with the units' statistics corrected."""
    figure, axes = new_figure(2, 2, width=9.5, height=6.6)
    for row, network in zip(axes, ("vgg11", "vgg19"), strict=True):
        for method, label in METHODS.items():
            chosen = [r for r in records if r["config"]["network"] == network and r["config"]["method"] == method]
            for record in chosen[:1]:
                for ax, metric in zip(row, ("loss", "accuracy"), strict=True):
                    plain, repaired = (path_of(record, kind, "test") for kind in ("plain", "repaired"))
                    ax.plot(plain.weights, plain.metrics[metric], color=COLORS[method], label=label)
                    ax.plot(repaired.weights, repaired.metrics[metric], color=COLORS[method], linestyle=":")
                    ax.set(title=f"{network.upper()}: test {metric}", xlabel="weight of the permuted network")
    if axes[0, 0].lines:
        labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(*labels, title="dotted: with REPAIR", loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, folder / "depth-curves")


def _draw_by_depth(records: list[dict[str, Any]], folder: Path) -> None:
    """Mean barrier and AUC of the VGGs, plain and repaired."""
    figure, axes = new_figure(2, 2, width=9.5, height=6)
    networks = [n for n in NETWORKS if n.startswith("vgg")]
    for row, kind in zip(axes, ("plain", "repaired"), strict=True):
        for ax, metric in zip(row, ("barrier", "auc"), strict=True):
            for method, label in METHODS.items():
                points = {}
                for network in networks:
                    chosen = [r for r in records if r["config"]["network"] == network and r["config"]["method"] == method]
                    if chosen:
                        points[network.upper()] = np.mean([getattr(path_of(r, kind, "test"), metric) for r in chosen])
                if points:
                    ax.plot(list(points), list(points.values()), color=COLORS[method], marker="o", label=label)
            name = "barrier" if metric == "barrier" else "AUC"
            ax.set(title=f"{name}, test loss" + (", with REPAIR" if kind == "repaired" else ""))
            ax.set_ylim(bottom=0)
    if axes[0, 0].lines:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, folder / "depth-barriers")
