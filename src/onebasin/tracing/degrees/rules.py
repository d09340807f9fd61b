"""What each operation requires of the degrees of its operands, by ATen name, beside `slots.slot_rules`.

An operation that is in neither table requires degree zero of everything it reads.
"""

from __future__ import annotations

from typing import Any

from onebasin.tracing.degrees.equations import System, times
from onebasin.tracing.slots import slot_rules as slots
from onebasin.tracing.slots.slot_rules import Rule, SlotArguments, add_operands, align_operands, keep, reduce
from onebasin.tracing.slots.system import TensorSlots
from onebasin.tracing.trace import NotCovered


def _prelu(system: System, args: SlotArguments) -> TensorSlots:
    system.forbid(*args["weight"])
    return args.input


def _power(exponent: Any) -> Rule:
    def rule(system: System, args: SlotArguments) -> TensorSlots:
        power = exponent if exponent is not None else args["exponent"]
        if isinstance(power, bool) or not isinstance(power, int | float) or power <= 0 or int(power) != power:
            raise NotCovered("no whole power")
        return tuple(tuple((atom, times(form, int(power))) for atom, form in slots) for slots in args.input)

    return rule


def _divide(system: System, args: SlotArguments) -> TensorSlots:
    if args.get("rounding_mode"):
        raise NotCovered("a quotient is rounded")
    result = []
    for first, *others in align_operands(args):
        for other in others:
            first = system.multiply(first, tuple((atom, times(form, -1)) for atom, form in other))
        result.append(first)
    return tuple(result)


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
    "square": _power(2),
    "pow": _power(None),
    **dict.fromkeys(("maximum", "minimum"), add_operands),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    "batch_norm": _batch_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _trailing_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), _group_norm),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), _weight_norm),
    **dict.fromkeys(("amax", "amin"), reduce),
}  # fmt: skip
