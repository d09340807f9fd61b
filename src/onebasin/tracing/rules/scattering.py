"""Writes at positions that an index names: the axis written along is pinned, sources are joined with what they go to.

Sums, means, products and extrema of what is written do not depend on the order of the sources. A plain write does, because
two sources may have the same target.
"""

from __future__ import annotations

from onebasin.tracing.axes.terms import ONE, Axes, AxisTerm
from onebasin.tracing.positions import Positions, pin_positions
from onebasin.tracing.rules.diagonals import write_diagonal, writes_diagonal
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.rules.indexing import has_masks
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, insert_axis, replace_axis

_WRITTEN = "an index writes along it"
_LAST = "the last of several writes counts"


def scatter(trace: Trace, args: Arguments) -> Axes:
    """An index for every entry of the source: result[.., index[.., i, ..], ..] = source[.., i, ..]."""
    if not args.input or len(args["index"]) != len(args.input):
        raise NotCovered("the index has another number of axes")
    dim, index, source = args.dim, args["index"], args.get("src")
    if source is not None:
        source = tuple(_leading(trace, axis, i.size) for axis, i in zip(source, index, strict=True))
        index = trace.join_axes(index, source)
    others = []
    for d, (axis, i) in enumerate(zip(args.input, index, strict=True)):
        if d != dim:
            others.append(trace.join(axis, i) if axis.size == i.size else _written(trace, axis, i))
    if source is not None and not _is_symmetric(args):
        trace.pin(index[dim], reason=_LAST)
    trace.scope(*index)
    return _write(trace, args.input[dim], others, dim, args["index"])


def index_add(trace: Trace, args: Arguments) -> Axes:
    """One index along one axis, for all entries of the others."""
    if not args.input:
        raise NotCovered("a scalar is written")
    dim, source = args.dim, args["source"] or (ONE,)
    if any(a.size != b.size for d, (a, b) in enumerate(zip(args.input, source, strict=True)) if d != dim):
        raise NotCovered("the source has another shape")  # tensors without values allow it
    chosen = trace.join(source[dim], *(args["index"] or (ONE,)))
    if not _is_symmetric(args):
        trace.pin(chosen, reason=_LAST)
    others = trace.join_axes(replace_axis(args.input, dim), replace_axis(source, dim))
    return _write(trace, args.input[dim], others, dim)


def index_put(trace: Trace, args: Arguments) -> Axes:
    """x[i, :, j] = values, which are broadcast."""
    axes, indices, values = args.input, list(args["indices"]), args["values"]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if has_masks(args):
        return _fill_masked(trace, args, indexed)
    if writes_diagonal(args):
        return write_diagonal(trace, args)
    common = broadcast(trace, *(indices[dim] for dim in indexed))
    start = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    kept = [axis for dim, axis in enumerate(axes) if dim not in indexed]
    target = (*kept[:start], *common, *kept[start:])
    joined = broadcast(trace, target, values)
    if not args["accumulate"]:
        trace.pin(*joined[start : start + len(common)], reason=_LAST)
    kept = [*joined[:start], *joined[start + len(common) :]]
    trace.pin(*(axes[dim] for dim in indexed), reason=_WRITTEN)
    trace.scope(*kept)
    result = list(kept)
    for dim in indexed:
        result.insert(dim, trace.pinned(axes[dim].size, _WRITTEN))
    return tuple(result)


def _fill_masked(trace: Trace, args: Arguments, indexed: list[int]) -> Axes:
    """x[:, mask] = number."""
    axes, values = args.input, args["values"]
    if len(indexed) > 1 or any(axis.size > 1 for axis in values):
        raise NotCovered("a mask selects where different numbers are written")
    start, mask = indexed[0], args["indices"][indexed[0]]
    if any(a.size != b.size for a, b in zip(axes[start : start + len(mask)], mask, strict=True)):
        raise NotCovered("the mask has another shape")  # tensors without values allow it
    return (*axes[:start], *trace.join_axes(axes[start : start + len(mask)], mask), *axes[start + len(mask) :])


def one_hot(trace: Trace, args: Arguments) -> Axes:
    """A one where an index points to."""
    return (*args.input, trace.pinned(args.shape[-1], _WRITTEN))


def count(trace: Trace, args: Arguments) -> Axes:
    """Histograms: how many entries fall into each bin, or the sum of their weights."""
    if args.get("weights") is not None:
        trace.join_axes(args.input, args["weights"])
    return (trace.pinned(args.shape[0], "numbers are counted along it"),)


def _leading(trace: Trace, axis: AxisTerm, size: int) -> AxisTerm:
    """The first entries of an axis of the source, of which an index may read fewer than there are."""
    if axis.size == size:
        return axis
    reason = "part of it is written"
    trace.pin(axis, reason=reason)
    return trace.pinned(size, reason)


def _written(trace: Trace, axis: AxisTerm, index: AxisTerm) -> AxisTerm:
    reason = "part of it is written to"
    trace.pin(axis, index, reason=reason)
    return trace.pinned(axis.size, reason)


def _write(trace: Trace, target: AxisTerm, others: Axes | list[AxisTerm], dim: int, index: Axes = ()) -> Axes:
    """The result, whose axes beside the target are those of the sources: they cannot depend on the target."""
    trace.scope(*others)
    if isinstance(index, Positions) and index.along.size == target.size:
        return insert_axis(others, dim, trace.join(target, index.along))
    pin_positions(index, trace.explain(_WRITTEN))
    trace.pin(target, reason=_WRITTEN)
    return insert_axis(others, dim, trace.pinned(target.size, _WRITTEN))


def _is_symmetric(args: Arguments) -> bool:
    return args.operation.rstrip("_") in ("scatter_add", "scatter_reduce", "index_add", "index_reduce") or "reduce" in args


RULES: dict[str, Rule] = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    **dict.fromkeys(("index_add", "index_copy", "index_reduce"), index_add),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), index_put),
    "one_hot": one_hot,
    **dict.fromkeys(("histc", "bincount"), count),
}
