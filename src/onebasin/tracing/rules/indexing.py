"""Indices read by position: the axis they select along is pinned, the others are kept."""

from __future__ import annotations

from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import ONE, Axes
from onebasin.tracing.axes.unification import narrow
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, insert_axis, replace_axis

_REASON = "an index selects along it"


def index(trace: Trace, args: Arguments) -> Axes:
    """x[i, :, j]: indices are broadcast. They stand in the place of the first, or in front if they are not adjacent."""
    axes, indices = args.input, list(args["indices"])
    indexed = [dim for dim, i in enumerate(indices) if i is not None]
    if has_masks(args):
        return _select_masked(trace, args, indexed)
    if (place := _find_place(args, indexed)) is not None:
        return narrow(axes, indexed[0], place % axes[indexed[0]].size, 1)
    trace.pin_order(axes, indexed, _REASON)
    common = broadcast(trace, *(indices[dim] for dim in indexed))
    is_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if is_adjacent else 0
    kept = [axis for dim, axis in enumerate(axes) if dim not in indexed]
    return (*kept[:start], *common, *kept[start:])


def _find_place(args: Arguments, indexed: list[int]) -> int | None:
    """The entry that a list of one number in the code selects, as in x[:, [-2]], which is like x[:, -2:-1]."""
    index = bind_arguments(args.node)["indices"][indexed[0]]
    numbers = index.meta["making"].meta.get("numbers") if "making" in index.meta else None
    if len(indexed) > 1 or numbers is None or numbers.is_meta or numbers.shape != (1,):
        return None
    return int(numbers)


def _select_masked(trace: Trace, args: Arguments, indexed: list[int]) -> Axes:
    """x[:, mask]: the axes of the mask become one, of what it selects."""
    if len(indexed) > 1:
        raise NotCovered("a mask selects beside another index")
    axes, start, mask = args.input, indexed[0], args["indices"][indexed[0]]
    stop = start + len(mask)
    trace.pin(*mask, reason=_REASON)
    trace.pin_order(axes, range(start, stop), _REASON)
    return (*axes[:start], trace.pinned(args.shape[start], _REASON), *axes[stop:])


def has_masks(args: Arguments) -> bool:
    """Whether there are booleans, or bytes, among the indices."""
    indices = bind_arguments(args.node)["indices"]
    return any(index is not None and not index.meta["val"].dtype.is_signed for index in indices)


def index_select(trace: Trace, args: Arguments) -> Axes:
    """One index along one axis."""
    trace.pin_order(args.input, [args.dim], _REASON)
    return replace_axis(args.input, args.dim, *(args["index"] or (ONE,)))


def gather(trace: Trace, args: Arguments) -> Axes:
    """An index for every entry of the result."""
    axes, chosen, dim = args.input, args["index"], args.dim
    if len(axes) != len(chosen):
        raise NotCovered("the index has another number of axes")
    partial = [d for d, (x, i) in enumerate(zip(axes, chosen, strict=True)) if d != dim and x.size != i.size]
    kept = [d for d in range(len(axes)) if d != dim and d not in partial]
    trace.pin_order(axes, [dim, *partial], _REASON)
    trace.pin(*(chosen[d] for d in partial), reason=_REASON)
    trace.scope(*(chosen[d] for d in kept))
    joined = dict(zip(kept, trace.join_axes(*([tensor[d] for d in kept] for tensor in (axes, chosen))), strict=True))
    return tuple(joined.get(d, i if d == dim else trace.pinned(i.size, _REASON)) for d, i in enumerate(chosen))


def take_along_dim(trace: Trace, args: Arguments) -> Axes:
    """As gather, but the other axes are broadcast."""
    axes, chosen = args.input, args["indices"]
    if args["dim"] is None or len(axes) != len(chosen):
        raise NotCovered("no axis is named, or the index has another number of axes")
    dim = args.dim
    trace.pin_order(axes, [dim], _REASON)
    trace.scope(*replace_axis(chosen, dim))
    others = broadcast(trace, replace_axis(axes, dim), replace_axis(chosen, dim))
    return insert_axis(others, dim, chosen[dim])


RULES: dict[str, Rule] = {
    "index": index,
    "index_select": index_select,
    "gather": gather,
    "take_along_dim": take_along_dim,
}
