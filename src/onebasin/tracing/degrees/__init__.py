"""Positive scales that leave a function alone, from the degrees of the values of its programs.

Multiply what belongs to unit i of a parameter by s_i to some power: its *degree* along that axis. The degrees of parameters
are unknown numbers. Those of every other value are sums of them: products add the degrees of their operands, ReLU and
pooling keep them. What an operation cannot keep is a linear equation: operands of a sum have equal degrees, an axis that is
summed over has degree zero, and so has everything that goes into an operation without a rule here. The solutions are the
scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.symmetries import Scale
from onebasin.torch_internals import find_schema
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.degrees.equations import System, atoms_of, zeros
from onebasin.tracing.degrees.rules import RULES, DegreeArguments
from onebasin.tracing.trace import NotCovered, Trace, iterate_tensors, operation_name


def find_scales(trace: Trace, names: Mapping[Atom, str], keys: Iterable[str]) -> dict[str, Scale]:
    """The positive scales of the named groups, by name.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
        keys: of the state, in order.
    """
    system = System(trace, names)
    for program, values in trace.walks:
        _Reading(system, program, values).run()
    return system.solve(list(keys))


class _Reading:
    """Goes through a program that was walked, and adds what its operations require to the system."""

    def __init__(self, system: System, program: Program, axes: Mapping[Node, Any]):
        self.system, self.program, self.axes = system, program, axes
        self.values: dict[Node, Any] = {}

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._read_placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._require_zero(node)
            else:
                self.values[node] = None

    def _read_placeholder(self, node: Node) -> Any:
        kind, name = self.program.inputs[node.name]
        if not isinstance(node.meta.get("val"), Tensor):
            return self.axes[node]
        key = self.system.trace.aliases.get(name, name)
        if kind in (InputKind.PARAMETER, InputKind.BUFFER) and key in self.system.trace.state:
            return self.system.read(key)
        return self._makezeros(self.axes[node])

    def _makezeros(self, axes: Any) -> Any:
        if isinstance(axes, list):
            return [self._makezeros(entry) for entry in axes]
        return tuple(map(zeros, self.system.template(axes))) if isinstance(axes, tuple) else axes

    def _call(self, node: Node) -> Any:
        name = operation_name(node)
        if name == "getitem":
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if not getattr(find_schema(node.target), "returns", True):
            return None
        name = name if name in RULES else name.removesuffix("_")
        expected = self._makezeros(self.axes[node])
        if name in RULES:
            try:
                found = RULES[name](self.system, self._bind(node, expected))
            except NotCovered:
                found = None
            if found is not None and _same_atoms(found, expected):
                return found
        self._require_zero(node)
        return expected

    def _bind(self, node: Node, expected: Any) -> DegreeArguments:
        bound = map_arg(bind_arguments(node), self.values.__getitem__)
        return DegreeArguments({"input" if n == "self" else n: v for n, v in bound.items()}, node, expected, self.program)

    def _require_zero(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            for degrees in iterate_tensors(self.values[operand]):
                self.system.require_zero(*degrees)


def _same_atoms(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same_atoms, found, expected))
    if expected is None or found is None:
        return expected is found
    return list(map(atoms_of, found)) == list(map(atoms_of, expected))
