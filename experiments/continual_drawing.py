"""Figures of continual learning, from records alone: accuracy over the stream, and accuracy against forgetting."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.continual_tables import BENCHMARKS, Run, collect, deviation, find_fronts, is_of, scores
from experiments.figures import save_svg
from onebasin.continual import AccuracyMatrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Look(NamedTuple):
    """How a strategy is drawn, in every figure alike."""

    color: str
    marker: str
    line: str


_BLACK, _BLUE, _SKY, _GREEN, _PINK = "#000000", "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
_RED, _ORANGE, _GREY = "#D55E00", "#E69F00", "#777777"
# Re-basin and its parts have circles and solid lines, baselines with a memory squares and dashes, others triangles and dots.
LOOKS = {
    "re-basin, stored outputs, late steps": Look(_BLUE, "o", "-"),
    "residual alone, stored outputs": Look(_SKY, "o", "-"),
    "re-basin, stored outputs": Look(_GREEN, "o", "-"),
    "re-basin": Look(_BLACK, "o", "-"),
    "residual alone": Look(_GREY, "o", "-"),
    "DER++": Look(_RED, "s", "--"),
    "CLeWI": Look(_ORANGE, "s", "--"),
    "MC-SGD": Look(_GREEN, "s", "--"),
    "replay": Look(_PINK, "s", "--"),
    "A-GEM": Look(_GREY, "s", "--"),
    "Stable SGD": Look(_GREEN, "^", ":"),
    "LwF": Look(_BLUE, "^", ":"),
    "EWC": Look(_RED, "^", ":"),
    "finetune": Look(_BLACK, "^", ":"),
}
_OTHER = Look(_GREY, "o", "-")
PUBLISHED = {
    "mnist": {"re-basin, published": (78.14, 0.12), "MC-SGD, published": (82.3, 0.08)},
    "cifar": {"re-basin, published": (51.34, 0.07), "MC-SGD, published": (63.3, 0.06)},
}
"""Accuracy in percent and forgetting, beside the fronts."""
_CLOSE = 3.7
"""Points of accuracy behind the best within which a strategy is drawn enlarged."""
_BELOW = 1.5
"""Points of accuracy below those strategies within which results on validation data are drawn."""


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """All figures, of records that nothing supersedes."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("for pictures: pip install 'onebasin[plots]'")
        return
    _draw_curves(records, folder)
    _draw_fronts(records, folder)


def find_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (accuracy, forgetting) those that no other one is ahead of in both, by rising forgetting.

    >>> find_front([(0.5, 0.1), (0.6, 0.2), (0.4, 0.15)])
    [(0.5, 0.1), (0.6, 0.2)]
    """
    front: list[tuple[float, float]] = []
    for accuracy, forgetting in sorted(points, key=lambda point: (point[1], -point[0])):
        if not front or accuracy > front[-1][0]:
            front.append((accuracy, forgetting))
    return front


def _draw_curves(records: list[dict[str, Any]], folder: Path) -> None:
    """For each benchmark, the mean accuracy of the tasks so far over time, a line per strategy, the best first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    for benchmark, title in BENCHMARKS.items():
        rows = collect(records, "tuned", benchmark)
        if not rows:
            continue
        figure = Figure(figsize=(6.8, 3.8), layout="constrained")
        ax = figure.subplots()
        for row, found in sorted(rows.items(), key=lambda item: -float(scores(item[1].values())[0].mean())):
            look = LOOKS.get(row, _OTHER)
            means = np.array([[100 * np.mean(line) for line in run["rows"]] for run in found.values()])
            steps, middle, spread = np.arange(1, means.shape[1] + 1), means.mean(0), means.std(0)
            ax.plot(steps, middle, look.line, color=look.color, label=row, linewidth=1.5)
            ax.fill_between(steps, middle - spread, middle + spread, color=look.color, alpha=0.12, linewidth=0)
        ax.set(xlabel="tasks learned", ylabel="mean accuracy of the tasks so far, %", title=title)
        ax.xaxis.set_major_locator(MaxNLocator(steps=[5, 10], integer=True))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.6)
        save_svg(figure, folder / f"continual-{benchmark}.svg")


def _draw_fronts(records: list[dict[str, Any]], folder: Path) -> None:
    """Accuracy against forgetting on test data: every strategy, and below them, enlarged, those close to the best."""
    from matplotlib.figure import Figure

    found = {benchmark: _find_points(records, benchmark) for benchmark in BENCHMARKS}
    benchmarks = [benchmark for benchmark, points in found.items() if points and find_fronts(records, benchmark)]
    if not benchmarks:
        return
    figure = Figure(figsize=(4.9 * len(benchmarks) + 1.2, 7.2), layout="constrained")
    axes = figure.subplots(2, len(benchmarks), squeeze=False)
    for column, benchmark in enumerate(benchmarks):
        points = found[benchmark]
        best = max(scores(settings[0])[0].mean() for settings in points.values())
        near = {row: settings for row, settings in points.items() if scores(settings[0])[0].mean() > best - _CLOSE}
        _draw_points(axes[0, column], {row: settings[:1] for row, settings in points.items()}, spread=False)
        for marker, (name, (accuracy, forgetting)) in zip("*D", PUBLISHED[benchmark].items(), strict=True):
            axes[0, column].plot(forgetting, accuracy, marker, color="black", markersize=8, label=name, linestyle="")
        axes[0, column].set(title=BENCHMARKS[benchmark])
        _draw_points(axes[1, column], near, spread=True)
        _draw_validation(axes[1, column], records, benchmark, near)
        axes[1, column].set(title="the best of them, enlarged", xlabel="forgetting")
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy, %")
    shown = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = [*(row for row in LOOKS if row in shown), *(row for row in shown if row not in LOOKS)]
    figure.legend([shown[row] for row in order], order, frameon=False, fontsize=8, loc="outside right upper")
    save_svg(figure, folder / "continual-front.svg")


def _find_points(records: list[dict[str, Any]], benchmark: str) -> dict[str, list[list[Run]]]:
    """For each row the runs of its best setting, and of those that were chosen among settings that forget little."""
    points: dict[str, list[list[Run]]] = {}
    for record in records:
        config, result = record["config"], record["result"]
        if is_of(config, "tuned", benchmark, 1):
            best = result["runs"]
            others = [each["runs"] for each in result.get("front", ()) if each["runs"][0]["variant"] != best[0]["variant"]]
            points[config["row"]] = [best, *others]
    return points


def _draw_points(ax: Axes, points: dict[str, list[list[Run]]], spread: bool) -> None:
    for row, settings in points.items():
        look = LOOKS.get(row, _OTHER)
        for number, runs in enumerate(settings):
            accuracy, forgetting, _ = scores(runs)
            errors = {"xerr": deviation(forgetting), "yerr": deviation(accuracy)} if spread else {}
            style = {"color": look.color, "markersize": 6, "elinewidth": 0.8, "capsize": 2}
            face = "white" if number else look.color
            label = None if number else row
            ax.errorbar(
                forgetting.mean(), accuracy.mean(), **errors, fmt=look.marker, markerfacecolor=face, label=label, **style
            )
    ax.spines[["top", "right"]].set_visible(False)


def _draw_validation(ax: Axes, records: list[dict[str, Any]], benchmark: str, near: dict[str, list[list[Run]]]) -> None:
    """What validation data found of each row: the settings that no other one is ahead of in both."""
    lowest = min(float(scores(settings[0])[0].mean()) for settings in near.values()) - _BELOW
    for row, result in find_fronts(records, benchmark).items():
        if row in near:
            matrices = [AccuracyMatrix(run["rows"]) for run in result["tuning"]]
            front = find_front((100 * matrix.average, matrix.forgetting) for matrix in matrices)
            shown = [(forgetting, accuracy) for accuracy, forgetting in front if accuracy > lowest]
            color = LOOKS.get(row, _OTHER).color
            ax.plot([f for f, _ in shown], [a for _, a in shown], "--.", color=color, linewidth=1, alpha=0.5)
