"""Reads between positions, at coordinates that a tensor gives, and sums of bags of rows."""

from __future__ import annotations

from onebasin.tracing.axes.terms import Axes
from onebasin.tracing.trace import Arguments, Rule, Trace

_COORDINATES = "coordinates name positions along it"
_BAGS = "an index selects along it"


def grid_sampler(trace: Trace, args: Arguments) -> Axes:
    """An image (batch, channel, positions) read at a grid (batch, new positions, coordinates)."""
    batch, channels, *positions = args.input
    grid_batch, *made, coordinates = args["grid"]
    trace.pin(*positions, coordinates, reason=_COORDINATES)
    batch = trace.join(batch, grid_batch)
    trace.scope(batch, channels)  # what the image and the result share
    trace.scope(batch, *made)  # what the grid and the result share
    return (batch, channels, *made)


def affine_grid(trace: Trace, args: Arguments) -> Axes:
    """The grid of an affine map, one per sample."""
    batch, *matrix = args["theta"]
    trace.pin(*matrix, reason=_COORDINATES)
    return (batch, *(trace.pinned(n, _COORDINATES) for n in args.shape[1:]))


def embedding_bag(trace: Trace, args: Arguments) -> list[Axes]:
    """The sum, mean or maximum of bags of rows; also returns where the bags are."""
    rows, units = args["weight"]
    trace.pin(rows, *args["indices"], *args["offsets"], *(args["per_sample_weights"] or ()), reason=_BAGS)
    trace.scope(units)
    others = [tuple(trace.pinned(n, _BAGS) for n in shape) for shape in args.shapes]
    if len(others[-1]) == 2:  # of a maximum: in which row of the table it was found, per unit
        others[-1] = (others[-1][0], units if args.shapes[-1][1] == units.size else others[-1][1])
    return [(others[0][0], units), *others[1:]]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), grid_sampler),
    "affine_grid_generator": affine_grid,
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), embedding_bag),
}
