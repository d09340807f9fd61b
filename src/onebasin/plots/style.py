"""Colours, dashes and empty axes. Drawing needs matplotlib, the extra ``onebasin[plots]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; line styles repeat the difference.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
GREY = "#777777"


def line_style(number: int, count: int) -> dict[str, Any]:
    """The colour and the dashes of one path among `count`."""
    color = GREY if number == 0 and count > 1 else COLORS[(number - (count > 1)) % len(COLORS)]
    return {"color": color, "linestyle": DASHES[number % len(DASHES)]}


def prepare_axes(ax: Axes | None, figsize: tuple[float, float] = (5.0, 3.4)) -> Axes:
    """Axes without a frame at the top and the right; of a new figure if None is given."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'onebasin[plots]'") from error
    if ax is None:
        _, ax = pyplot.subplots(figsize=figsize, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
