"""Reductions drop axes; softmax keeps them; pooling, padding and resampling keep channels and pin positions."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import ONE, Atom, Axes, Sum, Uniform
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, Rule, Trace

_NEIGHBOURS = "neighbouring positions are told apart"
_ORDER = "the order along it matters"
_POSITION = "a position along it is read"


def _drop(axes: Axes, dims: set[int], keep: bool) -> Axes:
    if keep:
        return tuple(ONE if i in dims else axis for i, axis in enumerate(axes))
    return tuple(axis for i, axis in enumerate(axes) if i not in dims)


def reduce(trace: Trace, args: Arguments) -> Axes:
    """A symmetric function of an axis: sum, mean, maximum, norm."""
    return _drop(args.input, args.axes(args.get("dim")), bool(args.get("keepdim")))


def maximum(trace: Trace, args: Arguments) -> Any:
    """max(x) reduces everything, max(x, y) is elementwise.

    max(x, dim) also returns where the maximum was found. The order along the axis matters only if that is read.
    """
    if "dim" not in args:
        return broadcast(trace, *args.operands) if "other" in args else ()
    result = reduce(trace, args)
    if any(user.args[1] == 1 and user.users for user in args.node.users):
        result = position(trace, args)
    return [result, result]


def loss(trace: Trace, args: Arguments) -> Axes:
    """A distance of two tensors, entry by entry, and the sum or mean of it."""
    result = broadcast(trace, args.input, args["target"])
    return result if args["reduction"] == 0 else ()


def position(trace: Trace, args: Arguments) -> Axes:
    """Argmax and argmin: a position along the axis is read."""
    trace.pin_order(args.input, args.axes(args.get("dim")), _POSITION)
    return reduce(trace, args)


def softmax(trace: Trace, args: Arguments) -> Axes:
    """All entries of an axis are treated alike, and the other axes are aligned along it."""
    x = args.input
    trace.scope(*_drop(x, args.axes(args["dim"]), keep=False))
    return x


def ordered(trace: Trace, args: Arguments) -> Any:
    """Cumulative sums, rolls, flips, sorts: the order along the axis matters, and a uniform axis need not stay uniform."""
    x = args.input
    dims = args.axes(args.get("dim", args.get("dims", -1)))
    trace.pin_order(x, dims, _ORDER)
    results = [tuple(trace.pinned(n, _ORDER) if d in dims else x[d] for d, n in enumerate(s)) for s in args.shapes]
    return results if args.returns_several else results[0]


def matrix_norm(trace: Trace, args: Arguments) -> Axes:
    """A norm of vectors, or of matrices: those of rows and columns that move independently."""
    dims = args.axes(args.get("dim"))
    if len(dims) == 2 and (args.get("ord") is not None or args.operation == "linalg_matrix_norm"):
        for dim in dims:
            trace.scope(*(axis for i, axis in enumerate(args.input) if i == dim or i not in dims))
    return reduce(trace, args)


def triangle(trace: Trace, args: Arguments) -> Axes:
    """Tril and triu: the order along the last two axes matters."""
    *batch, rows, columns = args.input
    trace.pin_order(args.input, [len(batch), len(batch) + 1], _ORDER)
    return (*batch, trace.pinned(rows.size, _ORDER), trace.pinned(columns.size, _ORDER))


def _pool(num_spatial: int) -> Rule:
    def pool(trace: Trace, args: Arguments) -> Any:
        """Channels are kept; positions are pinned, unless all of them are pooled into one."""
        channels, spatial = args.input[:-num_spatial], args.input[-num_spatial:]
        sizes = args.shape[-num_spatial:]
        pools_all = "adaptive" in args.operation and all(n == 1 for n in sizes)
        if not pools_all or args.returns_several:
            trace.pin(*spatial, reason=_NEIGHBOURS)
        trace.scope(*channels)
        result = (*channels, *(trace.pinned(n, _NEIGHBOURS) for n in sizes))
        return [result, result] if args.returns_several else result

    return pool


def pad(trace: Trace, args: Arguments) -> Axes:
    """A constant before and after an axis; a copy of the border tells positions apart."""
    copies = args.get("mode", "constant") != "constant" or args.operation.startswith(
        ("reflection", "replication", "circular")
    )
    pads, result = args["pad"] if "pad" in args else args["padding"], list(args.input)
    for i in range(len(pads) // 2):
        axis, (before, after) = len(result) - 1 - i, pads[2 * i : 2 * i + 2]
        if before == after == 0:
            continue
        if copies or before < 0 or after < 0:
            trace.pin_order(tuple(result), [axis], _NEIGHBOURS)
            result[axis] = trace.pinned(result[axis].size + before + after, _NEIGHBOURS)
        else:
            kept = result[axis] if result[axis].size != 1 else Atom(1)
            result[axis] = Sum(tuple(part for part in (Uniform(before), kept, Uniform(after)) if part.size))
    return tuple(result)


_SYMMETRIC = (
    "sum", "mean", "var", "std", "amax", "amin", "prod", "norm", "linalg_vector_norm", "logsumexp", "any", "all",
    "count_nonzero", "nansum", "nanmean",
)  # fmt: skip
_ORDERED = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll", "sort", "topk", "argsort")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SYMMETRIC, reduce),
    **dict.fromkeys(("max", "min", "median"), maximum),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), loss),
    **dict.fromkeys(("argmax", "argmin"), position),
    "kthvalue": lambda trace, args: [position(trace, args)] * 2,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "softmin"), softmax),
    **dict.fromkeys(_ORDERED, ordered),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("linalg_norm", "linalg_matrix_norm"), matrix_norm),
    **dict.fromkeys(("var_mean", "std_mean", "aminmax"), lambda trace, args: [reduce(trace, args)] * 2),
    **{
        f"{kind}_pool{n}d{suffix}": _pool(n)
        for n in (1, 2, 3)
        for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max", "_adaptive_avg")
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
