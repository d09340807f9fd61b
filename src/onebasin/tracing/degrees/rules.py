"""What each operation requires of the degrees of its operands, by ATen name, beside `slots.slot_rules`.

An operation that is in neither table requires degree zero of everything it reads.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from onebasin.tracing.degrees.equations import System, times
from onebasin.tracing.slots import slot_rules as slots
from onebasin.tracing.slots.arguments import Rule, SlotArguments, equate_operands
from onebasin.tracing.slots.indexing import choose
from onebasin.tracing.slots.slot_rules import COMPARISONS, keep, reduce
from onebasin.tracing.slots.system import TensorSlots
from onebasin.tracing.trace import NotCovered

_FINEST_POWER = 4
"""The largest denominator of a power: scales have whole ones, which would grow with it."""


def _prelu(system: System, args: SlotArguments) -> TensorSlots:
    system.forbid(*args["weight"])
    return args.input


_ANY_SCALE = (0.0, math.inf, -math.inf)
"""Numbers that no positive factor changes."""


def _bound(*names: str) -> Rule:
    """The largest or the smallest of some operands, entry by entry."""
    return lambda system, args: equate_operands(system, args, names, _ANY_SCALE)


def _extreme(system: System, args: SlotArguments) -> Any:
    """max(x, y) is elementwise, max(x) reduces everything, and max(x, dim) also returns where the maximum was found."""
    if "other" in args:
        return equate_operands(system, args, ("input", "other"), _ANY_SCALE)
    found = reduce(system, args)
    return [found, args.expected[1]] if isinstance(args.expected, list) else found


def _compare(system: System, args: SlotArguments) -> TensorSlots:
    """Which of two operands is larger stays so if both are multiplied by one positive number."""
    equate_operands(system, args, ("input", "other"), _ANY_SCALE)
    return args.expected


def _threshold(system: System, args: SlotArguments) -> TensorSlots:
    if args["threshold"] != 0 or args["value"] != 0:
        raise NotCovered("compared with a number")
    return args.input


def _rrelu(system: System, args: SlotArguments) -> TensorSlots:
    if args["training"]:
        raise NotCovered("slopes are drawn")
    return args.input


def _sign(system: System, args: SlotArguments) -> TensorSlots:
    """No positive factor changes it."""
    return args.expected


def _power(exponent: int | Fraction | None) -> Rule:
    def rule(system: System, args: SlotArguments) -> TensorSlots:
        power = exponent if exponent is not None else args["exponent"]
        if isinstance(power, bool) or not isinstance(power, int | float | Fraction):
            raise NotCovered("a power that varies")
        if power == 0 or not math.isfinite(power) or Fraction(power).denominator > _FINEST_POWER:
            raise NotCovered("a power that is no simple fraction")
        return _raise(args.input, Fraction(power))

    return rule


def _raise(tensor: TensorSlots, power: int | Fraction) -> TensorSlots:
    return tuple(tuple((atom, times(form, power)) for atom, form in axis) for axis in tensor)


def _spread(power: int) -> Rule:
    """A deviation or a variance over some axes; some operations return the mean as well."""

    def rule(system: System, args: SlotArguments) -> Any:
        mean = reduce(system, args)
        found = _raise(mean, power)
        return [found, mean] if isinstance(args.expected, list) else found

    return rule


def _length(system: System, args: SlotArguments) -> TensorSlots:
    """A norm of vectors."""
    if args.get("ord", args.get("p", 2)) == 0:
        raise NotCovered("entries are counted")
    return reduce(system, args)


def _batch_norm(system: System, args: SlotArguments) -> TensorSlots:
    """With stored statistics, x - mean needs equal degrees, and the root of var + eps takes them out again."""
    batch, channels, *spatial = args.input
    mean, variance, key = args.get("running_mean"), args.get("running_var"), args.key("running_var")
    system.forbid(batch, *spatial)
    if args.get("training", True) or mean is None or variance is None or key is None:
        system.forbid(channels, *(mean or ()), *(variance or ()))
    elif system.offsets.setdefault(key, args["eps"]) != args["eps"]:
        raise NotCovered("one variance is used with several eps")
    else:
        system.equate(channels, mean[0])
        system.equate(tuple((atom, times(form, 2)) for atom, form in channels), variance[0])
    return _affine(system, args, 1)


def _trailing_norm(system: System, args: SlotArguments) -> TensorSlots:
    system.forbid(*args.input)
    if len(args["normalized_shape"]) != 1:
        raise NotCovered("several axes are normalised together")
    return _affine(system, args, -1)


def _group_norm(system: System, args: SlotArguments) -> TensorSlots:
    statistics = [args[name] for name in ("running_mean", "running_var") if args.get(name) is not None]
    system.forbid(*args.input, *(axis for tensor in statistics for axis in tensor))
    return _affine(system, args, 1)


def _weight_norm(system: System, args: SlotArguments) -> Any:
    """Weights g v / |v|, with a length for each entry along one axis: factors of v vanish there, and g gives new ones."""
    if not args["g"]:
        raise NotCovered("one length of the whole tensor")
    direction, dim = args["v"], args["dim"] % len(args["v"])
    system.forbid(*(axis for number, axis in enumerate(direction) if number != dim))
    weight = args.expected[0] if isinstance(args.expected, list) else args.expected
    weight = (*weight[:dim], args["g"][dim], *weight[dim + 1 :])
    return [weight, *args.expected[1:]] if isinstance(args.expected, list) else weight


def _affine(system: System, args: SlotArguments, axis: int) -> TensorSlots:
    """What is normalised has degree zero, until a weight and a bias give it theirs."""
    weight, bias = args.get("weight"), args.get("bias")
    result = list(args.expected)
    if weight is not None:
        result[axis] = weight[0] if bias is None else system.equate(weight[0], bias[0])
    elif bias is not None:
        system.forbid(bias[0])
    return tuple(result)


RULES: dict[str, Rule] = {
    **slots.RULES,
    **dict.fromkeys(("relu", "leaky_relu", "abs", "absolute", "dropout", "feature_dropout"), keep),
    **{f"{kind}_pool{n}d{suffix}": keep for n in (1, 2, 3) for suffix in ("", "_with_indices")
       for kind in ("max", "adaptive_max")},
    "prelu": _prelu,
    "rrelu": _rrelu,
    "threshold": _threshold,
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), _bound("input", "min", "max")),
    "hardtanh": _bound("input", "min_val", "max_val"),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _bound("input", "other")),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(COMPARISONS, _compare),
    "where": choose("condition", ("input", "other"), _ANY_SCALE),
    "masked_fill": choose("mask", ("input", "value"), _ANY_SCALE),
    **dict.fromkeys(("sign", "sgn"), _sign),
    "square": _power(2),
    "pow": _power(None),
    "sqrt": _power(Fraction(1, 2)),
    "rsqrt": _power(Fraction(-1, 2)),
    "reciprocal": _power(-1),
    **dict.fromkeys(("std", "std_mean"), _spread(1)),
    **dict.fromkeys(("var", "var_mean"), _spread(2)),
    "linalg_vector_norm": _length,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _trailing_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), _group_norm),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), _weight_norm),
    **dict.fromkeys(("amax", "amin"), reduce),
}  # fmt: skip
