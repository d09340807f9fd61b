"""Indices read by position: the axis they select along is pinned, the others go through."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import Axes
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.walk import Rule, Trace

_REASON = "an index selects along it"


def index(trace: Trace, a: dict[str, Any]) -> Axes:
    """x[i, :, j]: indices are broadcast; they stand at the place of the first, or in front if they are apart."""
    axes, indices = a["input"], list(a["indices"])
    indices += [None] * (len(axes) - len(indices))
    where = [d for d, i in enumerate(indices) if i is not None]
    trace.pin(*(axes[d] for d in where), reason=_REASON)
    common = broadcast(trace, *(indices[d] for d in where))
    adjacent = where == list(range(where[0], where[-1] + 1))
    place = where[0] if adjacent else 0
    kept = [axis for d, axis in enumerate(axes) if d not in where]
    return (*kept[:place], *common, *kept[place:])


def index_select(trace: Trace, a: dict[str, Any]) -> Axes:
    """One index along one axis."""
    dim = a["dim"] % len(a["input"])
    trace.pin(a["input"][dim], reason=_REASON)
    return (*a["input"][:dim], *a["index"], *a["input"][dim + 1 :])


def gather(trace: Trace, a: dict[str, Any]) -> Axes:
    """An index for every entry of the result."""
    axes, chosen, dim = a["input"], a["index"], a["dim"] % len(a["input"])
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


RULES: dict[str, Rule] = {
    "index": index,
    "index_select": index_select,
    "gather": gather,
    "take_along_dim": gather,
}
