"""Reductions drop axes; softmax keeps them; pooling, padding and resampling keep channels and pin positions."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import ONE, Atom, Axes, Same, Sum
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.walk import Rule, Trace


def _dims(a: dict[str, Any], num_axes: int) -> set[int]:
    dim = a.get("dim")
    if dim is None or dim == []:
        return set(range(num_axes))
    return {d % num_axes for d in (dim if isinstance(dim, (list, tuple)) else [dim])} if num_axes else set()


def _drop(axes: Axes, dims: set[int], keep: bool) -> Axes:
    if keep:
        return tuple(ONE if i in dims else axis for i, axis in enumerate(axes))
    return tuple(axis for i, axis in enumerate(axes) if i not in dims)


def reduce(trace: Trace, a: dict[str, Any]) -> Axes:
    """A symmetric function of an axis: sum, mean, maximum, norm."""
    return _drop(a["input"], _dims(a, len(a["input"])), bool(a.get("keepdim")))


def reduce_pair(trace: Trace, a: dict[str, Any]) -> Any:
    """max(dim) also returns where it was found; only if that is read does the order along the axis matter."""
    if "dim" not in a:
        return broadcast_or_reduce(trace, a)
    indices_read = any(user.args[1] == 1 and user.users for user in a["node"].users)
    dims = _dims(a, len(a["input"]))
    if indices_read:
        trace.pin(*(a["input"][d] for d in dims), reason="a position along it is read")
    result = _drop(a["input"], dims, bool(a.get("keepdim")))
    return [result, result]


def var_mean(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """Two reductions at once."""
    result = reduce(trace, a)
    return [result, result]


def broadcast_or_reduce(trace: Trace, a: dict[str, Any]) -> Axes:
    """max(x) reduces everything; max(x, y) is elementwise."""
    return broadcast(trace, a["input"], a["other"]) if "other" in a else ()


def position(trace: Trace, a: dict[str, Any]) -> Axes:
    """Argmax and argmin: a position along the axis is read."""
    dims = _dims(a, len(a["input"]))
    trace.pin(*(a["input"][d] for d in dims), reason="a position along it is read")
    return _drop(a["input"], dims, bool(a.get("keepdim")))


def keep(trace: Trace, a: dict[str, Any]) -> Axes:
    """Softmax and its kin treat all entries of an axis alike, and see the other axes in line along it."""
    x = a["input"]
    trace.scope(*_drop(x, _dims(a, len(x)), keep=False))
    return x


_ORDER = "the order along it matters"


def ordered(trace: Trace, a: dict[str, Any]) -> Any:
    """Cumulative sums, rolls, flips, sorts: the order along the axis matters, and what was constant need not stay so."""
    x = a["input"]
    dims = a.get("dim", a.get("dims", -1))
    where = [d % len(x) for d in (dims if isinstance(dims, (list, tuple)) else [dims])] or range(len(x))
    trace.pin(*(x[d] for d in where), reason=_ORDER)
    values = a["node"].meta["val"]
    shapes = [tuple(int(n) for n in v.shape) for v in (values if isinstance(values, (list, tuple)) else [values])]
    results = [tuple(trace.pinned(n, _ORDER) if d in where else x[d] for d, n in enumerate(s)) for s in shapes]
    return results if isinstance(values, (list, tuple)) else results[0]


def triangle(trace: Trace, a: dict[str, Any]) -> Axes:
    """Tril and triu: the order along the last two axes matters."""
    *batch, rows, columns = a["input"]
    trace.pin(rows, columns, reason=_ORDER)
    return (*batch, trace.pinned(rows.size, _ORDER), trace.pinned(columns.size, _ORDER))


def _pool(num_spatial: int) -> Rule:
    def pool(trace: Trace, a: dict[str, Any]) -> Any:
        """Channels go through; positions are pinned, unless all of them are pooled alike."""
        x = a["input"]
        values = a["node"].meta["val"]
        shape = (values[0] if isinstance(values, (list, tuple)) else values).shape
        adaptive = "adaptive" in a["node"].target.name()
        everything = adaptive and all(int(n) == 1 for n in shape[len(shape) - num_spatial :])
        reason = "neighbouring positions are told apart"
        if not everything or isinstance(values, (list, tuple)):
            trace.pin(*x[len(x) - num_spatial :], reason=reason)
        made = tuple(trace.pinned(int(n), reason) for n in shape[len(shape) - num_spatial :])
        result = (*x[: len(x) - num_spatial], *made)
        return [result, result] if isinstance(values, (list, tuple)) else result

    return pool


def pad(trace: Trace, a: dict[str, Any]) -> Axes:
    """A constant laid before and after an axis; a copy of the border tells positions apart."""
    constant = a.get("mode", "constant") == "constant" and not a["node"].target.name().startswith(
        ("aten::reflection", "aten::replication", "aten::circular")
    )
    pads, result = a["pad"] if "pad" in a else a["padding"], list(a["input"])
    for i in range(len(pads) // 2):
        axis, (before, after) = len(result) - 1 - i, pads[2 * i : 2 * i + 2]
        if before == after == 0:
            continue
        if constant and before >= 0 and after >= 0:
            kept = result[axis] if result[axis].size > 1 else Atom(1)
            result[axis] = Sum(tuple(part for part in (Same(before), kept, Same(after)) if part.size))
        else:
            trace.pin(result[axis], reason="neighbouring positions are told apart")
            result[axis] = trace.pinned(result[axis].size + before + after, "neighbouring positions are told apart")
    return tuple(result)


_SYMMETRIC = (
    "sum", "mean", "var", "std", "amax", "amin", "prod", "norm", "linalg_vector_norm", "logsumexp", "any", "all",
    "count_nonzero", "nansum", "nanmean",
)  # fmt: skip
_ORDERED = (
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "flip",
    "roll",
    "sort",
    "topk",
    "argsort",
    "kthvalue",
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SYMMETRIC, reduce),
    **dict.fromkeys(("max", "min", "median"), reduce_pair),
    **dict.fromkeys(("argmax", "argmin"), position),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "softmin"), keep),
    **dict.fromkeys(_ORDERED, ordered),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("var_mean", "std_mean"), var_mean),
    **{
        f"{kind}_pool{n}d{suffix}": _pool(n)
        for n in (1, 2, 3)
        for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max", "fractional_max", "_adaptive_avg")
        for suffix in ("", "_with_indices")
    },
    **{
        f"upsample_{mode}{n}d": _pool(n)
        for mode in ("nearest", "_nearest_exact", "linear", "bilinear", "trilinear", "bicubic")
        for n in (1, 2, 3)
    },
    **{f"_upsample_{mode}": _pool(2) for mode in ("nearest_exact2d", "bilinear2d_aa", "bicubic2d_aa")},
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **{f"{mode}_pad{n}d": pad for mode in ("reflection", "replication") for n in (1, 2, 3)},
}
