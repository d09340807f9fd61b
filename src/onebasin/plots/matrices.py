"""Matrices as pictures: the loss on a plane, and permutations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from onebasin.plots.style import prepare_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_LEVELS = 12
_MAX_CELLS = 256


class Plane(Protocol):
    """The loss on a grid, as `onebasin.loss_plane` returns it."""

    @property
    def x(self) -> Sequence[float]:
        """Coordinates of the columns."""
        ...

    @property
    def y(self) -> Sequence[float]:
        """Coordinates of the rows."""
        ...

    @property
    def points(self) -> Sequence[tuple[float, float]]:
        """Coordinates of the three models."""
        ...

    @property
    def losses(self) -> Sequence[Sequence[float]]:
        """A row for each y."""
        ...


def plot_plane(plane: Plane, ax: Axes | None = None) -> Axes:
    """Draw the contours of the loss on a plane, with the three models; points without a finite loss stay white.

    >>> import onebasin as ob
    >>> from onebasin.plots import plot_plane
    >>> corners = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    >>> plot_plane(ob.Plane([0.0, 1.0], [0.0, 1.0], corners, {"loss": [[0.1, 0.2], [0.3, 0.9]]})).get_xlabel()
    'distance in parameters'
    """
    ax = prepare_axes(ax, figsize=(5.2, 4.2))
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
    """Draw a permutation (an index tensor, (n,)) or a soft plan ((n, n)) as a matrix: targets are rows, sources columns.

    >>> import torch
    >>> from onebasin.plots import plot_permutation
    >>> plot_permutation(torch.tensor([2, 0, 1])).get_xlabel()
    'source unit'
    """
    values = permutation.detach().cpu()
    soft = values.is_floating_point() and values.dim() == 2 and values.shape[0] == values.shape[1]
    if not soft and (values.is_floating_point() or values.dim() != 1):
        raise ValueError(
            "expected an index tensor (n,) or a plan (n, n); "
            f"got {values.dtype} of shape {tuple(values.shape)}. Of a family, draw one member at a time"
        )
    ax, size = prepare_axes(ax, figsize=(3.6, 3.6)), len(values)
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


def _shrink(matrix: np.ndarray) -> np.ndarray:
    """The largest entry of each block, so that the sharp entries of a large plan do not fall between the pixels."""
    block = -(-len(matrix) // _MAX_CELLS)
    if block == 1:
        return matrix
    starts = np.arange(0, len(matrix), block)
    return np.maximum.reduceat(np.maximum.reduceat(matrix, starts, axis=0), starts, axis=1)
