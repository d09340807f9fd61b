"""Indices read by position: the axis they select along is pinned, the others are kept."""

from __future__ import annotations

from onebasin.tracing.axes.terms import ONE, Axes
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, replace_axis

_REASON = "an index selects along it"


def index(trace: Trace, args: Arguments) -> Axes:
    """x[i, :, j]: indices are broadcast. They stand in the place of the first, or in front if they are not adjacent."""
    axes, indices = args.input, list(args["indices"])
    indexed = [dim for dim, i in enumerate(indices) if i is not None]
    trace.pin(*(axes[dim] for dim in indexed), reason=_REASON)
    common = broadcast(trace, *(indices[dim] for dim in indexed))
    is_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if is_adjacent else 0
    kept = [axis for dim, axis in enumerate(axes) if dim not in indexed]
    return (*kept[:start], *common, *kept[start:])


def index_select(trace: Trace, args: Arguments) -> Axes:
    """One index along one axis."""
    trace.pin(args.input[args.dim], reason=_REASON)
    return replace_axis(args.input, args.dim, *(args["index"] or (ONE,)))


def gather(trace: Trace, args: Arguments) -> Axes:
    """An index for every entry of the result."""
    axes, chosen, dim = args.input, args["index"], args.dim
    if len(axes) != len(chosen):
        raise NotCovered("the index has another number of axes")
    trace.pin(axes[dim], reason=_REASON)
    result = []
    for d, (x, i) in enumerate(zip(axes, chosen, strict=True)):
        if d == dim:
            result.append(i)
        elif x.size == i.size:
            result.append(trace.join(x, i))
        else:
            trace.pin(x, i, reason="part of it is indexed")
            result.append(trace.pinned(i.size, "part of it is indexed"))
    return tuple(result)


RULES: dict[str, Rule] = {"index": index, "index_select": index_select, "gather": gather}
