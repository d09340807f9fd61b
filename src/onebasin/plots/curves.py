"""Curves: the loss on a line, the history of a descent, accuracies over a stream of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onebasin.plots.style import COLORS, DASHES, GREY, line_style, prepare_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES = {
    "soft": ("soft plan", {"color": GREY, "linewidth": 1.0}),
    "hard": ("hardened", {"color": COLORS[0], "linewidth": 1.4}),
    "best": ("best so far", {"color": COLORS[1], "linewidth": 1.8, "linestyle": DASHES[1]}),
    "polish": ("polished", {"color": COLORS[2], "linestyle": "none", "marker": "D", "markersize": 5}),
    "inner": ("inner product of the weights", {"color": COLORS[0], "linewidth": 1.8, "marker": "o", "markersize": 4}),
}


class Path(Protocol):
    """Metrics at points of a line, as `onebasin.linear_path` returns them."""

    @property
    def weights(self) -> Sequence[float]:
        """The place of each point, from 0 to 1."""
        ...

    @property
    def metrics(self) -> Mapping[str, Sequence[float]]:
        """For each metric its value at each point."""
        ...


def plot_path(path: Path, ax: Axes | None = None, label: str | None = None, metric: str = "loss", **style: Any) -> Axes:
    """Draw a metric along the line between two models, and thinly the straight line between its ends.

    Args:
        path: what `linear_path` returned.
        ax: where to draw; a new figure if not given.
        label: for the legend.
        metric: which one.
        style: passed on to ``Axes.plot``.

    Returns:
        The axes, whose ``figure`` can be saved or shown.

    >>> import onebasin as ob
    >>> from onebasin.plots import plot_path
    >>> path = ob.LinearPath([0.0, 0.5, 1.0], {"loss": [0.1, 0.9, 0.2]})
    >>> axes = plot_path(path, label="as they are")
    >>> axes.get_ylabel()  # axes.figure can be saved
    'loss'
    """
    if metric not in path.metrics:
        raise ValueError(f"the path has no metric {metric!r}, it has {list(path.metrics)}")
    ax = prepare_axes(ax)
    values = path.metrics[metric]
    options = {"color": COLORS[0], "linewidth": 1.8, "solid_capstyle": "round", "label": label, **style}
    (line,) = ax.plot(path.weights, values, **options)
    ends = [values[0], values[-1]]
    ax.plot([0, 1], ends, color=line.get_color(), linewidth=0.8, alpha=0.45, zorder=1)
    ax.plot([0, 1], ends, "o", color=line.get_color(), markersize=4)
    ax.set_xlim(-0.02, 1.02)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["model A", "0.25", "0.5", "0.75", "model B"])
    ax.set_ylabel(metric)
    return ax


def plot_paths(paths: Mapping[str, Path], ax: Axes | None = None, metric: str = "loss") -> Axes:
    """Draw several paths with a legend; the keys are the labels.

    The first is drawn in grey, as the one that the others are compared with.

    >>> import onebasin as ob
    >>> from onebasin.plots import plot_paths
    >>> path = ob.LinearPath([0.0, 0.5, 1.0], {"loss": [0.1, 0.9, 0.2]})
    >>> aligned = ob.LinearPath([0.0, 0.5, 1.0], {"loss": [0.1, 0.2, 0.2]})
    >>> axes = plot_paths({"as they are": path, "aligned": aligned})
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['as they are', 'aligned']
    """
    if not paths:
        raise ValueError("there is no path to draw")
    ours, ax = ax is None, prepare_axes(ax, figsize=(6.4, 3.4))
    for number, (label, path) in enumerate(paths.items()):
        plot_path(path, ax, label, metric, **line_style(number, len(paths)))
    # Beside the curves, if the figure is ours to make wider; another's may have a neighbour there.
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if ours else {}
    ax.legend(frameon=False, handlelength=2.6, **place)
    return ax


def history_series(history: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The curves in the history of an alignment: for each quantity that can be drawn, steps (or sweeps) and values.

    Of several methods that followed each other the last is drawn, with what its result was polished to. Empty for a method
    that does not descend, such as activation matching.
    """
    methods = [entry["by"] for entry in history if entry.get("by", "polish") != "polish"]
    series: dict[str, tuple[list[int], list[float]]] = {}
    last = 0
    for entry in history:
        if "polish" not in entry and entry.get("by") != (methods[-1] if methods else None):
            continue
        last = entry.get("step", entry.get("sweep", last))
        for name in entry.keys() & _SERIES.keys():
            steps, values = series.setdefault(name, ([], []))
            steps.append(last + 1)
            values.append(entry[name])
    return {name: series[name] for name in _SERIES if name in series}


def plot_history(history: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw how an alignment went: the cost of the soft and the hardened plan per step, or the inner product per sweep.

    Args:
        history: of an `Alignment`.
        ax: where to draw; a new figure if not given.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> from onebasin.plots import plot_history
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method="weight-matching")
    >>> plot_history(result.history).get_xlabel()
    'sweep'
    """
    series = history_series(history)
    if not series:
        raise ValueError("the history holds no curve: this method does not descend step by step")
    ax = prepare_axes(ax)
    from matplotlib.ticker import MaxNLocator

    for name, (steps, values) in series.items():
        label, style = _SERIES[name]
        ax.plot(steps, values, label=label, **style)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    ax.set_xlabel("sweep" if "inner" in series else "step")
    ax.set_ylabel(_SERIES["inner"][0] if "inner" in series else "cost")
    if len(series) > 1:
        ax.legend(frameon=False, handlelength=2.6)
    return ax


def plot_accuracies(
    rows: Sequence[Sequence[float]], ax: Axes | None = None, label: str = "mean of the tasks so far"
) -> Axes:
    """Draw the accuracy on each task over the tasks of a stream, and thickly their mean.

    Args:
        rows: row t holds the accuracies on tasks 0 ... t after task t, as in `onebasin.continual.AccuracyMatrix`.
        ax: where to draw; a new figure if not given.
        label: of the mean, for the legend.

    >>> from onebasin.plots import plot_accuracies
    >>> axes = plot_accuracies([[0.9], [0.95, 0.8], [0.7, 0.6, 0.9]])
    >>> axes.get_ylabel()
    'accuracy'
    """
    if not rows:
        raise ValueError("there is no task to draw")
    ax, count = prepare_axes(ax), len(rows)
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colors = colormaps["cividis"](np.linspace(0, 0.9, count))
    for task in range(count):
        values = [rows[t][task] for t in range(task, count)]
        ax.plot(range(task + 1, count + 1), values, color=colors[task], linewidth=1, marker="o", markersize=2.5, alpha=0.8)
    means = [float(np.mean(row[: t + 1])) for t, row in enumerate(rows)]
    ax.plot(range(1, count + 1), means, color=COLORS[1], linewidth=2.4, label=label)
    ax.set_xlabel("tasks learned")
    ax.set_ylabel("accuracy")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax
