"""What each operation requires of changes of basis, by ATen name, beside `slots.slot_rules`.

An operation that is in neither table allows nothing but permutations of everything it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.export.graph_signature import InputKind
from torch.fx import Node

from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.bases.classes import FROZEN, Freedom, Paired, System
from onebasin.tracing.rules.recurrent import list_cells
from onebasin.tracing.slots import slot_rules as slots
from onebasin.tracing.slots.arguments import Rule, SlotArguments
from onebasin.tracing.slots.slot_rules import reduce
from onebasin.tracing.slots.system import Segments, Slots, TensorSlots, atoms_of
from onebasin.tracing.trace import NotCovered


def _square(system: System, args: SlotArguments) -> TensorSlots:
    return tuple(system.multiply(axis, axis) for axis in args.input)


def _power(system: System, args: SlotArguments) -> TensorSlots:
    """A square, or an odd or even function."""
    exponent = args["exponent"]
    if not isinstance(args.input, tuple) or not isinstance(exponent, int | float) or not float(exponent).is_integer():
        raise NotCovered("no whole power")
    if exponent == 2:
        return _square(system, args)
    return _odd(system, args) if exponent % 2 else _even(system, args)


def _clamp(system: System, args: SlotArguments) -> TensorSlots:
    """Odd between bounds that are each other's negatives; where the lower one is above the other, the result is constant."""
    low, high = args.get("min"), args.get("max")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low != -high or high < 0:
        raise NotCovered("not odd")
    return _odd(system, args)


def _multiply(system: System, args: SlotArguments) -> TensorSlots:
    for argument in ("input", "other"):
        _note_gain(system, args, argument)
    return slots.RULES["mul"](system, args)


def _note_gain(system: System, args: SlotArguments, argument: str) -> None:
    node = bind_arguments(args.node).get("self" if argument == "input" else argument)
    source = system.vectors.sources.get(node) if isinstance(node, Node) else None
    if source is None or (source.offset is None and not any(args[argument])):
        return
    neutral = None if source.offset is None else 1 - source.offset
    system.gains[source.key] = neutral if system.gains.get(source.key, neutral) == neutral else None


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


def _spread(system: System, args: SlotArguments) -> Any:
    """The deviation or the variance over some axes: a length where the mean is zero. Some operations return the mean too.

    Along the other axes it is an even function.
    """
    dims = args.axes(args.get("dim"))
    system.narrow(Freedom.CENTRED, *(args.input[number] for number in dims))
    mean = reduce(system, args)
    system.narrow(Freedom.SIGNED, *mean)
    found = tuple(system.constant(atoms_of(axis)) for axis in mean)
    return [found, mean] if isinstance(args.expected, list) else found


def _cosine_similarity(system: System, args: SlotArguments) -> TensorSlots:
    """A sum of products, divided by both lengths."""
    first, second = args["x1"], args["x2"]
    if len(first) != len(second):
        raise NotCovered("operands of different ranks")
    for number, pair in enumerate(zip(first, second, strict=True)):
        if number != args["dim"] % len(first):
            system.forbid(*pair)
            continue
        system.narrow(Freedom.ORTHOGONAL, *pair)
        system.contract(*pair)
    return args.expected


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


def _weight_norm(system: System, args: SlotArguments) -> Any:
    """Weights g v / |v|, with a length for each entry along one axis: rotations along the others leave it alone."""
    if not args["g"]:
        raise NotCovered("one length of the whole tensor")
    direction, dim = args["v"], args["dim"] % len(args["v"])
    system.forbid(direction[dim], *args["g"])
    others = [axis for number, axis in enumerate(direction) if number != dim]
    if sum(map(bool, others)) > 1:
        raise NotCovered("several axes have one length together")
    system.narrow(Freedom.ORTHOGONAL, *others)
    return [direction, *args.expected[1:]] if isinstance(args.expected, list) else direction


def _dropout(system: System, args: SlotArguments) -> TensorSlots:
    if args.get("train", args.get("training", True)) and args["p"]:
        raise NotCovered("entries are dropped one by one")
    return args.input


_CANDIDATES = {"lstm": (4, 2), "gru": (3, 2), "rnn_tanh": (1, 0)}
"""How many gates a cell has, and which of them is no sigmoid: its tanh is what the cell adds to its state."""


def _recurrent(system: System, args: SlotArguments) -> list[TensorSlots]:
    """Recurrent layers: a unit of the candidate may change its sign, and so do its state and its output."""
    if "input" not in args or args.get("train"):
        raise NotCovered("packed sequences, or dropout between layers")
    *others, units = args.input
    states = args["hx"] if isinstance(args["hx"], list) else [args["hx"]]
    system.forbid(*others, *(axis for state in states for axis in state))
    num_directions = 2 if args["bidirectional"] else 1
    cells: list[Slots] = []
    outputs: list[Slots] = []
    for number, weights in enumerate(list_cells(args, num_directions)):
        if number and number % num_directions == 0:
            units = tuple(itertools.chain(*outputs[-num_directions:]))
        cell, output = _step(system, units, weights, *_CANDIDATES[args.operation])
        if not _starts_from_zeros(args):
            system.forbid(cell, output)
        cells.append(cell)
        outputs.append(output)
    last = tuple(itertools.chain(*outputs[-num_directions:]))
    result = [(*args.expected[0][:-1], last)]
    for number, (wanted, found) in enumerate(zip(args.expected[1:], (outputs, cells), strict=False), start=1):
        result.append(_stack_states(wanted, found) if _is_used(args.node, number) else wanted)
    return result


def _step(system: System, x: Slots, weights: Sequence[Any], num_gates: int, candidate: int) -> tuple[Slots, Slots]:
    """What the state of a cell and its output do along their units."""
    to_gates, from_state, *biases, projection = weights
    system.contract(x, to_gates[1])
    changing = []
    for gates in (to_gates, from_state, *(bias for bias in biases if bias is not None)):
        size, left = divmod(len(gates[0]), num_gates)
        if left:
            raise NotCovered("gates of different structures")
        system.forbid(gates[0][: candidate * size], gates[0][(candidate + 1) * size :])
        changing.append(gates[0][candidate * size :][:size])
    cell = output = system.equate(*changing)
    system.narrow(Freedom.SIGNED, cell)
    if projection is not None:
        system.contract(cell, projection[1])
        output = projection[0]
    system.contract(output, from_state[1])
    return cell, output


def _starts_from_zeros(args: SlotArguments) -> bool:
    """Whether the first states are zeros that the layer makes itself: those have no sign."""
    found = bind_arguments(args.node)["hx"]
    nodes = found if isinstance(found, list | tuple) else [found]
    made = {name for name, (kind, _) in args.program.inputs.items() if kind is InputKind.CONSTANT_TENSOR}
    return all(node.name in made and not bool(args.program.given[node.name].any()) for node in nodes)


def _is_used(node: Node, number: int) -> bool:
    """Whether anything reads one of the results of an operation."""
    return any(user.users for user in node.users if user.args[1] == number)


def _stack_states(wanted: TensorSlots, states: Sequence[Slots]) -> TensorSlots:
    *others, last = wanted
    if isinstance(last, Segments):
        return (*others, Segments(states))
    if len(states) > 1:
        raise NotCovered("states of several cells side by side")
    return (*others, states[0])


RULES: dict[str, Rule] = {
    **slots.RULES,
    "square": _square,
    "pow": _power,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("mul", "multiply"), _multiply),
    "layer_norm": _norm(Freedom.CENTRED),
    "rms_norm": _norm(Freedom.ORTHOGONAL),
    "linalg_vector_norm": _length,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    "cosine_similarity": _cosine_similarity,
    **dict.fromkeys(("dropout", "feature_dropout"), _dropout),
    **dict.fromkeys(
        ("tanh", "sin", "asin", "arcsin", "atan", "arctan", "sinh", "asinh", "arcsinh", "erf", "sign", "sgn", "hardtanh",
         "softshrink", "hardshrink"),
        _odd,
    ),
    **dict.fromkeys(("abs", "absolute", "cos", "cosh"), _even),
    "batch_norm": _batch_norm,
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), _weight_norm),
    **dict.fromkeys(_CANDIDATES, _recurrent),
}  # fmt: skip
