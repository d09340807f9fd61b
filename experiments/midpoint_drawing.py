"""Pictures of what is left between two networks: the loss on the line, and the midpoint accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.figures import save_svg
from onebasin.plots.style import COLORS, GREY, line_style

_MARKERS = "oDs^v"


def draw_lines(panels: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> None:
    """A panel per network, with the loss at equal steps on the line by each method; the first method in grey."""
    figure = Figure(figsize=(3.1 * len(panels), 3.3), layout="constrained")
    for axes, (network, losses) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for number, (method, values) in enumerate(losses.items()):
            weights = [step / (len(values) - 1) for step in range(len(values))]
            axes.plot(weights, values, label=method, linewidth=1.8, **line_style(number, len(losses)))
        axes.set_title(network, fontsize=10)
        axes.set_xticks([0, 0.5, 1], ["A", "midpoint", "B"])
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_ylabel("test loss")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, handlelength=2.6)
    save_svg(figure, file)


def draw_midpoints(
    rows: Mapping[str, Mapping[str, float]], ends: Mapping[str, float], published: Mapping[str, float], file: Path
) -> None:
    """A row per network, with the midpoint accuracy in percent by each method, beside the ends and what is published."""
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    methods = list(dict.fromkeys(method for row in rows.values() for method in row))
    for y, network in enumerate(rows):
        axes.axhline(y, color="#dddddd", linewidth=0.8, zorder=0)
        axes.plot([ends[network]] * 2, [y - 0.35, y + 0.35], color="black", linewidth=2, label="ends" if y == 0 else None)
    for number, method in enumerate(methods):
        points = [(row[method], y) for y, row in enumerate(rows.values()) if method in row]
        color = GREY if number == 0 else COLORS[number - 1]
        axes.plot(*zip(*points, strict=True), _MARKERS[number], color=color, markersize=7, label=method, clip_on=False)
    points = [(published[network], y) for y, network in enumerate(rows) if network in published]
    axes.plot(*zip(*points, strict=True), "*", color="black", mfc="white", markersize=11, label="published", zorder=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="test accuracy at the midpoint, %")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, handletextpad=0.3)
    save_svg(figure, file)
