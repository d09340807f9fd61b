"""Elementwise operations: whatever is at the same place moves together."""

from __future__ import annotations

from typing import Any

from onebasin.tracing.axes.terms import ONE, Axes, Same
from onebasin.tracing.axes.unification import cut, join_all
from onebasin.tracing.walk import Rule, Trace


def pointwise(trace: Trace, a: dict[str, Any]) -> Axes:
    """Unify all operands, aligned at the last axis; where one has extent one it is broadcast."""
    operands = [value for value in a.values() if isinstance(value, tuple)]
    return broadcast(trace, *operands)


def broadcast(trace: Trace, *operands: Axes) -> Axes:
    """The common axes of operands under broadcasting, parents joined before children."""
    num_axes = max((len(axes) for axes in operands), default=0)
    result: Axes = (ONE,) * num_axes
    for axes in operands:
        padded = (ONE,) * (num_axes - len(axes)) + axes
        pairs = [(a if a.size > 1 else b, b if b.size > 1 else a) for a, b in zip(result, padded, strict=True)]
        result = tuple(join_all(pairs, trace.why))
    return result


def like_input(trace: Trace, a: dict[str, Any]) -> Axes:
    """The same tensor under another name, type or memory layout."""
    return a["input"]


def dropout(trace: Trace, a: dict[str, Any]) -> Axes:
    """Nothing in eval mode; where it is forced on, a random mask."""
    if a["train"]:
        raise ValueError("dropout is on in eval mode")
    return a["input"]


def prelu(trace: Trace, a: dict[str, Any]) -> Axes:
    """A slope a channel."""
    x, (slopes,) = a["input"], a["weight"]
    if slopes.size == 1:
        return x
    channel = 1 if len(x) > 1 else 0
    joined = trace.join(x[channel], slopes)
    return tuple(joined if axis == channel else term for axis, term in enumerate(x))


def glu(trace: Trace, a: dict[str, Any]) -> Axes:
    """First * sigmoid(second), the two halves of an axis."""
    x, dim = a["input"], a["dim"] % len(a["input"])
    first, second = cut(x[dim], [x[dim].size // 2])
    joined = trace.join(first, second)
    return tuple(joined if axis == dim else term for axis, term in enumerate(x))


def fill_with_input(trace: Trace, a: dict[str, Any]) -> Axes:
    """Copy and fill: the shape of the target, the values of the source."""
    source = a.get("src", a.get("value"))
    source = source if isinstance(source, tuple) else ()
    shape = tuple(int(n) for n in a["node"].meta["val"].shape)
    return tuple(t if t.size == n else Same(n) for t, n in zip(_pad(source, len(shape)), shape, strict=True))


def _pad(axes: Axes, num_axes: int) -> Axes:
    return (ONE,) * (num_axes - len(axes)) + axes


# Elementwise operations that PyTorch does not tag as such.
_UNTAGGED = (
    "masked_fill", "where", "relu6", "selu", "log_sigmoid", "silu", "mish", "hardswish", "celu", "elu", "gelu", "softplus",
    "hardtanh", "hardsigmoid", "leaky_relu", "threshold", "sigmoid", "tanh", "relu", "clamp", "square", "rsub", "softsign",
    "bitwise_not", "logical_and", "logical_or", "logical_not", "isnan", "isfinite", "float_power", "true_divide", "divide",
    "multiply", "subtract", "negative", "absolute", "clip", "lerp", "addcmul", "addcdiv", "__and__", "__or__",
    "_prelu_kernel",
)  # fmt: skip

_SAME = (
    "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh_copy", "lift_fresh", "type_as", "positive",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNTAGGED, pointwise),
    **dict.fromkeys(_SAME, like_input),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), dropout),
    "prelu": prelu,
    "glu": glu,
    "copy": fill_with_input,
    "fill": fill_with_input,
}
