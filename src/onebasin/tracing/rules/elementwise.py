"""Elementwise operations: entries at the same position move together."""

from __future__ import annotations

from onebasin.tracing.axes.terms import ONE, Axes, Uniform
from onebasin.tracing.axes.unification import cut, join_all
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, replace_axis


def pointwise(trace: Trace, args: Arguments) -> Axes | list[Axes]:
    """Join all operands, aligned at the last axis. An operand of extent one is broadcast."""
    result = broadcast(trace, *args.operands)
    return [result] * len(args.shapes) if args.returns_several else result


def broadcast(trace: Trace, *operands: Axes) -> Axes:
    """The common axes of operands under broadcasting, parents joined before children."""
    num_axes = max((len(axes) for axes in operands), default=0)
    result: Axes = (ONE,) * num_axes
    for axes in operands:
        pairs = zip(result, _pad(axes, num_axes), strict=True)
        result = tuple(join_all([(a if a.size != 1 else b, b if b.size != 1 else a) for a, b in pairs], trace.mismatch))
    return result


def dropout(trace: Trace, args: Arguments) -> Axes:
    """Nothing in eval mode; where it is forced on, a random mask."""
    if args["train"]:
        raise NotCovered("dropout is on in eval mode")
    return args.input


def prelu(trace: Trace, args: Arguments) -> Axes:
    """One slope per channel, or one for all."""
    x, slopes = args.input, trace.join(*args["weight"])
    channel = min(1, len(x) - 1)
    return x if slopes.size == 1 else replace_axis(x, channel, trace.join(x[channel], slopes))


def glu(trace: Trace, args: Arguments) -> Axes:
    """First * sigmoid(second), for the two halves of an axis."""
    axis = args.input[args.dim]
    return replace_axis(args.input, args.dim, trace.join(*cut(axis, [axis.size // 2])))


def fill_with_input(trace: Trace, args: Arguments) -> Axes:
    """Copy and fill: the shape of the target, the values of the source."""
    source = args.get("src", args.get("value"))
    axes = _pad(source if isinstance(source, tuple) else (), len(args.shape))
    return tuple(
        axis if axis.size == n else Uniform(n, repeats=bool(source)) for axis, n in zip(axes, args.shape, strict=True)
    )


def _pad(axes: Axes, num_axes: int) -> Axes:
    return (ONE,) * (num_axes - len(axes)) + axes


# Elementwise operations that PyTorch does not tag as such.
_UNTAGGED = (
    "masked_fill", "where", "relu6", "selu", "log_sigmoid", "silu", "mish", "hardswish", "celu", "elu", "gelu", "softplus",
    "hardtanh", "hardsigmoid", "leaky_relu", "threshold", "sigmoid", "tanh", "relu", "clamp", "square", "rsub", "softsign",
    "bitwise_not", "logical_and", "logical_or", "logical_not", "isnan", "isfinite", "float_power", "true_divide", "divide",
    "multiply", "subtract", "negative", "absolute", "clip", "lerp", "addcmul", "addcdiv", "__and__", "__or__",
    "_prelu_kernel", "floor_divide",
)  # fmt: skip

_SAME = (
    "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh_copy", "lift_fresh", "type_as", "positive",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNTAGGED, pointwise),
    **dict.fromkeys(_SAME, lambda trace, args: args.input),  # in another type or memory layout
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), dropout),
    "prelu": prelu,
    "glu": glu,
    "copy": fill_with_input,
    "fill": fill_with_input,
}
