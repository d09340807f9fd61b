"""Goes through programs that were walked, and adds what their operations require to a system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.torch_internals import find_schema
from onebasin.tracing.slots.arguments import Rule, SlotArguments
from onebasin.tracing.slots.slot_rules import COMPARISONS, TAKES_SEGMENTS
from onebasin.tracing.slots.system import Segments, SlotSystem, atoms_of, list_parts
from onebasin.tracing.trace import NotCovered, iterate_tensors, operation_name


class Reading:
    """One program, read once.

    Args:
        system: what the operations require is added to it.
        rules: by the ATen names of operations. One without a rule forbids everything along the axes of its operands.
        program: what is read.
        axes: of the results of its operations.
    """

    def __init__(self, system: SlotSystem, rules: Mapping[str, Rule], program: Program, axes: Mapping[Node, Any]):
        self.system, self.rules, self.program, self.axes = system, rules, program, axes
        self.values: dict[Node, Any] = {}

    def run(self) -> None:
        """Read it."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._read_placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._forbid_operands(node)
            else:
                self.values[node] = None

    def _read_placeholder(self, node: Node) -> Any:
        kind, name = self.program.inputs[node.name]
        if not isinstance(node.meta.get("val"), Tensor):
            return self.axes[node]
        key = self.system.trace.aliases.get(name, name)
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER) or key not in self.system.trace.state:
            return self.system.make_constant(self.axes[node])
        found = self.system.read(key)
        if not _rounds(node):
            return found
        self.system.forbid(*(part for axis in found for part in list_parts(axis)))
        return self.system.make_constant(self.axes[node])

    def _call(self, node: Node) -> Any:
        name = operation_name(node)
        if name == "getitem":
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        shifted = self.system.vectors.find_shifted(node)
        if shifted is not None and self.system.absorbs_offset(shifted):
            return self.values[node.all_input_nodes[0]]
        if not getattr(find_schema(node.target), "returns", True):
            return None
        name = name if name in self.rules else name.removesuffix("_")
        expected = self.system.make_constant(self.axes[node])
        takes_it = name in TAKES_SEGMENTS or not self._has_segments(node)
        if name in self.rules and takes_it and (name in COMPARISONS or not _rounds(node)):
            try:
                found = self.rules[name](self.system, self._bind(node, expected))
            except NotCovered:
                found = None
            if found is not None and _same_atoms(found, expected):
                return found
        self._forbid_operands(node)
        return expected

    def _bind(self, node: Node, expected: Any) -> SlotArguments:
        bound = map_arg(bind_arguments(node), self.values.__getitem__)
        return SlotArguments({"input" if n == "self" else n: v for n, v in bound.items()}, node, expected, self.program)

    def _forbid_operands(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            for tensor in iterate_tensors(self.values[operand]):
                self.system.forbid(*(part for axis in tensor for part in list_parts(axis)))

    def _has_segments(self, node: Node) -> bool:
        tensors = (tensor for operand in node.all_input_nodes for tensor in iterate_tensors(self.values[operand]))
        return any(isinstance(axis, Segments) for tensor in tensors for axis in tensor)


def _rounds(node: Node) -> bool:
    """Whether a value is of whole numbers or truth values: no factor and no matrix passes through an operation with them."""
    values = node.meta.get("val")
    first = values[0] if isinstance(values, list | tuple) and values else values
    return isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex())


def _same_atoms(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same_atoms, found, expected))
    if expected is None or found is None:
        return expected is found
    return list(map(atoms_of, found)) == list(map(atoms_of, expected))
