"""Pictures of paths, planes, permutations and descents. Needs matplotlib, the extra ``onebasin[plots]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from onebasin.landscape.paths import Path, Plane

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; line styles repeat the difference.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
GREY = "#777777"
_NUM_LEVELS = 12
_SERIES = {
    "soft": ("soft plan", {"color": GREY, "linewidth": 1.0}),
    "hard": ("hardened", {"color": COLORS[0], "linewidth": 1.4}),
    "best": ("best so far", {"color": COLORS[1], "linewidth": 1.8, "linestyle": _DASHES[1]}),
    "polish": ("polished", {"color": COLORS[2], "linestyle": "none", "marker": "D", "markersize": 5}),
    "inner": ("inner product of the weights", {"color": COLORS[0], "linewidth": 1.8, "marker": "o", "markersize": 4}),
}
_MAX_CELLS = 256


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
    """
    if metric not in path.metrics:
        raise ValueError(f"the path has no metric {metric!r}, it has {list(path.metrics)}")
    ax = _prepare(ax)
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
    """
    if not paths:
        raise ValueError("there is no path to draw")
    ours, ax = ax is None, _prepare(ax, figsize=(6.4, 3.4))
    for number, (label, path) in enumerate(paths.items()):
        plot_path(path, ax, label, metric, **line_style(number, len(paths)))
    # Beside the curves, if the figure is ours to make wider; another's may have a neighbour there.
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if ours else {}
    ax.legend(frameon=False, handlelength=2.6, **place)
    return ax


def line_style(number: int, count: int) -> dict[str, Any]:
    """The colour and the dashes of one path among `count`."""
    color = GREY if number == 0 and count > 1 else COLORS[(number - (count > 1)) % len(COLORS)]
    return {"color": color, "linestyle": _DASHES[number % len(_DASHES)]}


def plot_plane(plane: Plane, ax: Axes | None = None) -> Axes:
    """Draw the contours of the loss on a plane, with the three models; points without a finite loss stay white."""
    ax = _prepare(ax, figsize=(5.2, 4.2))
    from matplotlib.colors import BoundaryNorm
    from matplotlib.patheffects import withStroke

    losses = np.ma.masked_invalid(np.array(plane.losses))
    if not losses.count():
        raise ValueError("the loss is not finite anywhere on the plane: there is nothing to draw")
    levels = _choose_levels(losses.compressed())
    colors = BoundaryNorm(levels, 256)
    filled = ax.contourf(plane.x, plane.y, losses, levels=levels, cmap="cividis", norm=colors, extend="max")
    ax.contour(plane.x, plane.y, losses, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
    outline = [withStroke(linewidth=2.5, foreground="white")]
    for (x, y), name in zip(plane.points, "ABC", strict=True):
        ax.plot(x, y, "o", color="black", markersize=6, markeredgecolor="white", markeredgewidth=1.2)
        ax.annotate(name, (x, y), (6, 6), textcoords="offset points", weight="bold", path_effects=outline)
    bar = ax.figure.colorbar(filled, cax=ax.inset_axes((1.03, 0, 0.035, 1)), ticks=levels[::2], format="%.3g")
    bar.set_label("loss")
    bar.outline.set_visible(False)  # type: ignore[operator]
    ax.set_aspect("equal")
    ax.set_xlabel("distance in parameters")
    return ax


def _choose_levels(losses: np.ndarray) -> np.ndarray:
    """Levels close to each other near the minimum, where models live; the steepest tenth of the points is one colour."""
    low, high = float(losses.min()), float(np.quantile(losses, 0.9))
    if not high > low:
        high = max(float(losses.max()), low + max(abs(low), 1.0) * 1e-3)
    return low + (high - low) * np.linspace(0, 1, _NUM_LEVELS) ** 2


def plot_permutation(permutation: Tensor, ax: Axes | None = None) -> Axes:
    """Draw a permutation (an index tensor, (n,)) or a soft plan ((n, n)) as a matrix: targets are rows, sources columns."""
    values = permutation.detach().cpu()
    soft = values.is_floating_point() and values.dim() == 2 and values.shape[0] == values.shape[1]
    if not soft and (values.is_floating_point() or values.dim() != 1):
        raise ValueError(
            "expected an index tensor (n,) or a plan (n, n); "
            f"got {values.dtype} of shape {tuple(values.shape)}. Of a family, draw one member at a time"
        )
    ax, size = _prepare(ax, figsize=(3.6, 3.6)), len(values)
    if soft:
        picture = _shrink(values.float().numpy())
        ax.imshow(picture, cmap="Greys", vmin=0, extent=(-0.5, size - 0.5, size - 0.5, -0.5), interpolation="nearest")
    else:
        # A marker, unlike a pixel, is seen however many units there are.
        points = 72 * ax.get_window_extent().width / ax.figure.dpi
        ax.plot(values.numpy(), np.arange(size), "s", color="black", markersize=max(1.5, 0.8 * points / size), mew=0)
        ax.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
    ax.set_aspect("equal")
    ax.spines[:].set_visible(True)
    ax.spines[:].set(color="#bbbbbb", linewidth=0.6)
    ax.set_xticks([0, size - 1])
    ax.set_yticks([0, size - 1])
    ax.tick_params(length=0)
    ax.set_xlabel("source unit", labelpad=-4)
    ax.set_ylabel("target unit", labelpad=-8)
    return ax


def history_series(history: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """The curves in the history of an alignment: for each quantity that can be drawn, steps (or sweeps) and values.

    Empty for a method that does not descend, such as activation matching.
    """
    series: dict[str, tuple[list[int], list[float]]] = {}
    for number, entry in enumerate(history):
        for name in entry.keys() & _SERIES.keys():
            steps, values = series.setdefault(name, ([], []))
            steps.append(entry.get("step", entry.get("sweep", number)) + 1)
            values.append(entry[name])
    return {name: series[name] for name in _SERIES if name in series}


def plot_history(history: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw how an alignment went: the cost of the soft plan and of the hardened one a step, or the inner product a sweep.

    Args:
        history: of an `Alignment`.
        ax: where to draw; a new figure if not given.
    """
    series = history_series(history)
    if not series:
        raise ValueError("the history holds no curve: this method does not descend step by step")
    ax = _prepare(ax)
    from matplotlib.ticker import MaxNLocator

    for name, (steps, values) in series.items():
        label, style = _SERIES[name]
        ax.plot(steps, values, label=label, **style)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    ax.set_xlabel("sweep" if "sweep" in history[0] else "step")
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
    """
    if not rows:
        raise ValueError("there is no task to draw")
    ax, count = _prepare(ax), len(rows)
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colors = colormaps["cividis"](np.linspace(0, 0.9, count))
    for task in range(count):
        values = [rows[t][task] for t in range(task, count)]
        ax.plot(range(task + 1, count + 1), values, color=colors[task], linewidth=1, marker="o", markersize=2.5, alpha=0.8)
    means = [float(np.mean(row[: t + 1])) for t, row in enumerate(rows)]
    ax.plot(range(1, count + 1), means, color=COLORS[1], linewidth=2.4, label=label)
    ax.set_xlabel("tasks learnt")
    ax.set_ylabel("accuracy")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return ax


def _shrink(matrix: np.ndarray) -> np.ndarray:
    """The largest entry of each block, so that the sharp entries of a large plan do not fall between the pixels."""
    block = -(-len(matrix) // _MAX_CELLS)
    if block == 1:
        return matrix
    starts = np.arange(0, len(matrix), block)
    return np.maximum.reduceat(np.maximum.reduceat(matrix, starts, axis=0), starts, axis=1)


def _prepare(ax: Axes | None, figsize: tuple[float, float] = (5.0, 3.4)) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'onebasin[plots]'") from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=figsize, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
