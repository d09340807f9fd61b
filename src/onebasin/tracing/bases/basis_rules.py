"""What each operation requires of changes of basis, by ATen name, beside `slots.slot_rules`.

An operation that is in neither table allows nothing but permutations of everything it reads.
"""

from __future__ import annotations

from onebasin.tracing.bases.classes import FROZEN, UNIFORM, Freedom, Paired, System
from onebasin.tracing.slots import slot_rules as slots
from onebasin.tracing.slots.slot_rules import Rule, SlotArguments, align_operands, keep, reduce
from onebasin.tracing.slots.system import TensorSlots, atoms_of
from onebasin.tracing.trace import NotCovered


def _square(system: System, args: SlotArguments) -> TensorSlots:
    if args.get("exponent", 2) != 2:
        raise NotCovered("no square")
    return tuple(system.multiply(axis, axis) for axis in args.input)


def _multiply(system: System, args: SlotArguments) -> TensorSlots:
    for argument in ("input", "other"):
        _note_gain(system, args, argument)
    return slots.RULES["mul"](system, args)


def _note_gain(system: System, args: SlotArguments, argument: str) -> None:
    key = args.key("self" if argument == "input" else argument)
    if key is not None and len(args[argument]) == 1:
        system.gains[key] = None


def _divide(system: System, args: SlotArguments) -> TensorSlots:
    """By what is the same along the axes of the dividend."""
    if args.get("rounding_mode"):
        raise NotCovered("a quotient is rounded")
    result = []
    for dividend, *divisors in align_operands(args):
        system.forbid(*(axis for axis in divisors if any(state != UNIFORM for _, state in axis)))
        for divisor in divisors:
            dividend = system.multiply(dividend, divisor)
        result.append(dividend)
    return tuple(result)


def _expand(system: System, args: SlotArguments) -> TensorSlots:
    """New axes stand in front; what was one entry is the same everywhere."""
    padded = ((),) * (len(args.expected) - len(args.input)) + args.input
    return tuple(
        axis if axis else tuple((atom, UNIFORM) for atom, _ in wanted)
        for axis, wanted in zip(padded, args.expected, strict=True)
    )


def _norm(freedom: Freedom) -> Rule:
    """Division by the length of the last axis. A gain that is not filled with one number tells units apart."""

    def rule(system: System, args: SlotArguments) -> TensorSlots:
        if len(args["normalized_shape"]) != 1:
            raise NotCovered("several axes are normalised together")
        *others, last = args.input
        system.forbid(*others)
        system.narrow(freedom, last)
        weight, bias = args.get("weight"), args.get("bias")
        if weight is not None:
            _note_gain(system, args, "weight")
            last = system.multiply(last, weight[0])
        if bias is not None:
            last = system.equate(last, bias[0])
        return (*others, last)

    return rule


def _length(system: System, args: SlotArguments) -> TensorSlots:
    """The Euclidean norm along some axes."""
    if args.get("ord", args.get("p", 2)) not in (None, 2, 2.0):
        raise NotCovered("another norm than the Euclidean one")
    args["input"] = _square(system, args)
    return reduce(system, args)


def _odd(system: System, args: SlotArguments) -> TensorSlots:
    """f(-x) = -f(x)."""
    low, high = args.get("min_val", -1), args.get("max_val", 1)
    if low != -high:
        raise NotCovered("not odd")
    system.narrow(Freedom.SIGNED, *args.input)
    return tuple(tuple((a, FROZEN if isinstance(s, Paired) else s) for a, s in axis) for axis in args.input)


def _even(system: System, args: SlotArguments) -> TensorSlots:
    """f(-x) = f(x)."""
    system.narrow(Freedom.SIGNED, *args.input)
    return tuple(system.constant(atoms_of(axis)) for axis in args.input)


def _batch_norm(system: System, args: SlotArguments) -> TensorSlots:
    """With stored statistics: (x - mean) / deviation * weight + bias."""
    batch, channels, *spatial = args.input
    mean, variance = args.get("running_mean"), args.get("running_var")
    if args.get("training", True) or mean is None or variance is None:
        raise NotCovered("statistics of the batch")
    system.forbid(batch, *spatial, variance[0], *(args.get("weight") or ()))
    channels = system.equate(channels, mean[0])
    system.narrow(Freedom.SIGNED, channels)
    if args.get("bias") is not None:
        channels = system.equate(channels, args["bias"][0])
    return (batch, channels, *spatial)


def _dropout(system: System, args: SlotArguments) -> TensorSlots:
    if args.get("train", args.get("training", True)) and args["p"]:
        raise NotCovered("entries are dropped one by one")
    return args.input


RULES: dict[str, Rule] = {
    **slots.RULES,
    "square": _square,
    "pow": _square,
    **dict.fromkeys(("mul", "multiply"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "layer_norm": _norm(Freedom.CENTRED),
    "rms_norm": _norm(Freedom.ORTHOGONAL),
    "linalg_vector_norm": _length,
    **dict.fromkeys(("dropout", "feature_dropout"), _dropout),
    **dict.fromkeys(("roll", "flip"), keep),
    **dict.fromkeys(
        ("tanh", "sin", "asin", "arcsin", "atan", "arctan", "sinh", "asinh", "arcsinh", "erf", "sign", "sgn", "hardtanh",
         "softshrink", "hardshrink"),
        _odd,
    ),
    **dict.fromkeys(("abs", "absolute", "cos", "cosh"), _even),
    "batch_norm": _batch_norm,
}  # fmt: skip
