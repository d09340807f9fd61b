"""What a rule for slots is given: the arguments of an operation, and which of them are zero."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.slots.system import Slots, SlotSystem, TensorSlots
from onebasin.tracing.trace import Arguments, NotCovered, operation_name

_ZEROS = ("zeros", "zeros_like", "new_zeros", "zero", "zero_")
_FILLING = (*_ZEROS, "full")
"""Operations that make tensors of one number. In a recording a constant that was filled with any number is ``full``."""
_COPIES = ("detach", "alias", "lift_fresh", "clone", "contiguous", "expand", "to", "_to_copy", "type_as")
"""Operations whose result has the entries of their first operand."""


class SlotArguments(Arguments):
    """The arguments of an operation by the names of its schema, tensors as `TensorSlots`.

    Attributes:
        expected: the result with its atoms, as a constant.
        program: of the operation.
    """

    def __init__(self, values: Mapping[str, Any], node: Node, expected: Any, program: Program):
        super().__init__(values, node)
        self.expected, self.program = expected, program

    @property
    def input(self) -> Any:
        """The slots of the first operand."""
        return self["input"]

    def key(self, argument: str) -> str | None:
        """The state key of an argument that is a parameter or buffer by itself."""
        node = bind_arguments(self.node).get(argument)
        return self.program.keys.get(node.name) if isinstance(node, Node) else None


Rule = Callable[[Any, SlotArguments], Any]
"""Adds what an operation requires to a system, and returns the slots of the result. Where the result has other atoms than
expected, or the rule raises `NotCovered`, everything along the axes of the operands is forbidden."""


def align_operands(args: SlotArguments) -> list[list[Slots]]:
    """For each axis of an elementwise result the slots of the operands that have it."""
    return _align([value for value in args.values() if isinstance(value, tuple)], len(args.expected))


def _check_finite(args: SlotArguments, name: str) -> None:
    """One number everywhere is kept by a matrix that keeps the vector of ones, unless the number is infinite."""
    node = bind_arguments(args.node).get("self" if name == "input" else name)
    given = args.program.given.get(node.name) if isinstance(node, Node) else None
    if isinstance(given, Tensor) and not given.is_meta and not bool(given.isfinite().all()):
        raise NotCovered("an infinite number")


def pad(tensor: TensorSlots, num_axes: int) -> TensorSlots:
    """A tensor with axes of one entry in front, as broadcasting adds them."""
    return ((),) * (num_axes - len(tensor)) + tensor


def _align(operands: list[TensorSlots], num_axes: int) -> list[list[Slots]]:
    return [list(column) for column in zip(*(pad(value, num_axes) for value in operands), strict=True)]


def equate_operands(
    system: SlotSystem, args: SlotArguments, names: Collection[str], ignored: Collection[float] = (0.0,)
) -> TensorSlots:
    """Operands of which entries stand beside each other in the result: they change in the same way.

    Args:
        system: what that requires is added to it.
        args: of an operation.
        names: of the operands.
        ignored: numbers that are the same whatever happens, as zero is; a tensor of zeros always is.
    """
    operands = []
    for name in names:
        value = args.get(name)
        if isinstance(value, tuple):
            if not is_zero(args, name):
                _check_finite(args, name)
                operands.append(value)
        elif value is not None and value not in ignored:
            raise NotCovered("another number than zero")
    if not operands:
        return args.expected
    return tuple(system.equate(*column) for column in _align(operands, len(args.expected)))


def weigh(system: SlotSystem, weights: TensorSlots, tensor: TensorSlots) -> TensorSlots:
    """A tensor whose entries are taken, left out or multiplied as another tensor says, which nothing may change."""
    num_axes = max(len(weights), len(tensor))
    system.forbid(*weights)
    return tuple(system.multiply(*pair) for pair in zip(pad(weights, num_axes), pad(tensor, num_axes), strict=True))


def is_zero(args: SlotArguments, argument: str) -> bool:
    """Whether an operand is the number zero, or a tensor of zeros that the module makes: no factor and no matrix changes it.

    A table that a module keeps does not count: it may be a state that is not set yet.
    """
    value = bind_arguments(args.node).get("self" if argument == "input" else argument)
    if isinstance(value, Node):
        return is_filled_with_zeros(value, args.program)
    return isinstance(value, int | float) and value == 0


def is_filled_with_zeros(value: Node, program: Program) -> bool:
    """The same for a tensor of a program."""
    value = _find_original(value)
    if value.op == "call_function":
        if operation_name(value) not in ("fill", "fill_"):
            return operation_name(value) in _ZEROS
        number = bind_arguments(value)["value"]
        return is_filled_with_zeros(number, program) if isinstance(number, Node) else number == 0
    making, given = value.meta.get("making"), program.given.get(value.name)
    if making is None or not isinstance(given, Tensor) or given.is_meta:
        return False
    making = _find_original(making)
    is_number = "numbers" in making.meta and given.dim() == 0
    is_filled = making.op == "call_function" and operation_name(making) in _FILLING
    return (is_number or is_filled) and not bool(given.any())


def _find_original(node: Node) -> Node:
    while node.op == "call_function" and operation_name(node) in _COPIES:
        node = node.all_input_nodes[0]
    return node
