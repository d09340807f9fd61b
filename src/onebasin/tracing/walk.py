"""One walk over a program: every operation's rule constrains the axes of the tensors it touches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.programs.noise import draws_numbers
from onebasin.programs.shapes import bind_arguments, iterate_leaves
from onebasin.symmetries import Pin
from onebasin.torch_internals import find_schema
from onebasin.tracing.axes.scopes import enforce
from onebasin.tracing.axes.terms import ONE, Atom, Axes, AxisTerm, Uniform, leaves
from onebasin.tracing.axes.unification import pin, pinned
from onebasin.tracing.buffers import find_fixed_buffer_reason
from onebasin.tracing.positions import iterate_marked, pin_positions
from onebasin.tracing.rules import LOOKUPS, MOVING, RULES, pointwise
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, iterate_tensors, operation_name

WEIGHT_OPERATIONS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"}
"""Operations whose output channels follow from their operands. Rules of other operations add theirs to `Trace.units`."""


def walk(program: Program, trace: Trace, rules: Mapping[str, Rule] = RULES, with_sites: bool = True) -> None:
    """Apply the rules to the operations of a program, in order, and add what they require to the trace.

    Args:
        program: the operations.
        trace: what was found so far.
        rules: by the name of the operation.
        with_sites: add the results of modules too, where activations can be compared.
    """
    _Walk(program, trace, rules, with_sites).run()


@dataclass
class _Walk:
    program: Program
    trace: Trace
    rules: Mapping[str, Rule]
    with_sites: bool
    values: dict[Node, Any] = field(default_factory=dict)  # axes of a tensor, a list of those, or any other argument
    weights: set[Node] = field(default_factory=set)  # parameters, and what is computed from parameters alone
    idle: dict[Node, set[Atom]] = field(default_factory=dict)  # `Trace.idle` of operations

    def run(self) -> None:
        results = _ModuleResults()
        for node in self.program.graph.nodes:
            self.trace.enter(operation_name(node), _module_call(node)[0])
            if node.op == "placeholder":
                node.meta["kind"] = self.program.inputs[node.name][0]
                self.values[node] = self._read_placeholder(node)
                if self.program.inputs[node.name][0] == InputKind.PARAMETER:
                    self.weights.add(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
                operands = [n for n in node.all_input_nodes if n in self.values]
                if operands and all(n in self.weights for n in operands):
                    self.weights.add(node)
                else:
                    self._count_units(node, operands)
                results.add(node, self.values[node])
            elif node.op == "output":
                self._pin_outputs(node)
            else:
                self.values[node] = None
        self._find_read_atoms()
        self.trace.walks.append((self.program, self.values))
        if self.with_sites:
            results.finish()
            self.trace.modules += results.found

    def _find_read_atoms(self) -> None:
        """Add the atoms of parameters whose entries some result depends on to the trace, from the last results backwards.

        An atom that an operation carries to its result is read if it is read there. One that ends in the operation is read
        by it, unless the operation only moves entries (a slice), or sums it against constants.
        """
        atoms = {node: self._atoms([node]) for node in self.values}
        read: dict[Node, set[Atom]] = {}
        for node in reversed(self.program.graph.nodes):
            if node.op == "output":
                read.update({n: atoms[n] for n in node.all_input_nodes})
                continue
            if node.op == "call_function" and not node.users and operation_name(node) not in MOVING:  # computed and dropped
                read[node] = atoms[node]
            if node.op == "call_function" and node in read:
                results = [node] if isinstance(self.values[node], tuple) else [n for n in node.users if n in read]
                made = set().union(*(atoms[n] for n in results))
                idle = {leaf for atom in self.idle.get(node, ()) for leaf in leaves(atom)}
                for operand in node.all_input_nodes:
                    ends = set() if operation_name(node) in MOVING else atoms[operand] - made - idle
                    read[operand] = read.get(operand, set()) | atoms[operand] & read[node] | ends
            elif node.name in self.program.keys and node in read:
                key = self.program.keys[node.name]
                self.trace.read.setdefault(self.trace.aliases.get(key, key), set()).update(read[node])

    def _read_placeholder(self, node: Node) -> Any:
        kind, name = self.program.inputs[node.name]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape = tuple(map(int, value.shape))
        if kind == InputKind.USER_INPUT:
            return tuple(pinned(n, Pin("model input", name)) for n in shape)
        if kind in (InputKind.PARAMETER, InputKind.BUFFER):
            key = self.trace.aliases.get(name, name)
            fixed = find_fixed_buffer_reason(self.program, node) if kind == InputKind.BUFFER else None
            if node.users:
                self.trace.reached.add(key)
            if key not in self.trace.state:
                self.trace.state[key] = tuple(ONE if n == 1 else Atom(n) for n in shape)
                self.trace.scopes.append(self.trace.state[key])
            if fixed is not None:
                for axis in self.trace.state[key]:
                    pin(axis, Pin(fixed, name))
            return self.trace.state[key]
        return self._read_making(node.meta["making"], name) if "making" in node.meta else _read_constant(node, name)

    def _read_making(self, made: Node, name: str) -> Axes:
        """The axes of a constant that operations made, by the rules of the operations."""
        pending = [made]
        while pending:
            node = pending[-1]
            needed = [n for n in node.all_input_nodes if n not in self.values]
            pending += needed
            if needed:
                continue
            if node.op == "placeholder" or not (node.all_input_nodes or self._find_rule(node)):
                self.values[node] = _read_constant(node, name)
            else:
                self.trace.enter(operation_name(node) if node.all_input_nodes else name, "")
                self.values[node] = self._call(node)
            pending.pop()
        return self.values[made]

    def _call(self, node: Node) -> Any:
        if operation_name(node) == "getitem":
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if not getattr(find_schema(node.target), "returns", True):
            return None  # a check at run time
        rule = self._find_rule(node)
        try:
            if rule is None:
                raise NotCovered("no rule for this operation")
            result = rule(self.trace, self._bind(node))
            if self.trace.idle:
                self.idle[node] = self.trace.idle
                self.trace.unmet |= self.trace.idle
        except NotCovered as error:
            self._pin_positions(node, str(error))
            result = self._pin_all(node, str(error) if rule is None else f"the rule does not cover this use: {error}")
        expected = _shapes(node.meta.get("val"))
        assert _sizes(result) == expected, f"the rule of {node.target} returns {_sizes(result)}, not {expected}"
        for axes in iterate_tensors(result):
            self.trace.scope(*axes)
        for axes in self._operands(node):
            enforce(tuple(axis for axis in axes if axis.size != 1))
        return result

    def _find_rule(self, node: Node) -> Rule | None:
        name = operation_name(node)
        if name.endswith("_") and not name.endswith("__") and name not in self.rules:
            name = name[:-1]
        if any(True for n in node.all_input_nodes for _ in iterate_marked(self.values.get(n))):
            if name in LOOKUPS:
                return LOOKUPS[name]
            self._pin_positions(node, "a position along it is read")
        if name in self.rules:
            return self.rules[name]
        is_elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws_numbers(node)
        return pointwise if is_elementwise else None

    def _bind(self, node: Node) -> Arguments:
        given = bind_arguments(node)
        if any(isinstance(leaf, Node) for name in _find_integers(node.target) for leaf in iterate_leaves(given[name])):
            raise NotCovered("a position or a size depends on values")
        bound = map_arg(given, self.values.__getitem__)
        return Arguments({"input" if name == "self" else name: value for name, value in bound.items()}, node)

    def _operands(self, node: Node) -> Iterable[Axes]:
        return iterate_tensors([self.values[n] for n in node.all_input_nodes if n in self.values])

    def _pin_all(self, node: Node, reason: str) -> Any:
        """Pin everything that an operation touches."""
        for axes in self._operands(node):
            self.trace.pin(*axes, reason=reason)

        def make_pinned(shape: Any) -> Any:
            if isinstance(shape, list):
                return [make_pinned(s) for s in shape]
            return None if shape is None else tuple(self.trace.pinned(n, reason) for n in shape)

        return make_pinned(_shapes(node.meta.get("val")))

    def _pin_positions(self, node: Node, reason: str) -> None:
        for operand in node.all_input_nodes:
            pin_positions(self.values.get(operand), self.trace.explain(reason))

    def _pin_outputs(self, node: Node) -> None:
        self.trace.enter("output", "")
        self._pin_positions(node, "model output")
        names: dict[Any, str] = {}
        if self.program.output_names:
            for operand, name in zip(node.args[0], self.program.output_names, strict=True):  # type: ignore[arg-type]
                names.setdefault(operand, name)
        for operand in node.all_input_nodes:
            self.trace.enter(names.get(operand, "output"), "")
            for axes in iterate_tensors(self.values.get(operand)):
                self.trace.outputs += axes
                self.trace.pin(*axes, reason="model output")

    def _count_units(self, node: Node, operands: list[Node]) -> None:
        """Add the output channels of an operation between an activation and weights to the trace."""
        names = tuple(n.name for n in operands if n in self.weights)
        if not names or operation_name(node) not in WEIGHT_OPERATIONS:
            return
        weights, inputs = self._atoms(n for n in operands if n in self.weights), self._atoms(set(operands) - self.weights)
        for number, term in enumerate(self.values[node]):
            found = set(leaves(term))
            if found and found <= weights and not found & inputs:
                self.trace.units[(*names, str(number))] = term

    def _atoms(self, nodes: Iterable[Node]) -> set[Atom]:
        return {atom for n in nodes for axes in iterate_tensors(self.values[n]) for term in axes for atom in leaves(term)}


class _ModuleResults:
    """Collects the result of every call of a leaf module: the result of the last operation that ran inside it.

    If that operation has several results (a recurrent layer) the first one is collected, with a mark.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int, Axes, bool]] = []
        self._num_calls: dict[str, int] = {}
        self._current: tuple[tuple[str, str], Any, bool] | None = None

    def add(self, node: Node, value: Any) -> None:
        call = _module_call(node)
        if self._current and self._current[0] != call:
            self.finish()
        if isinstance(value, list):
            self._current = (call, value[0] if value else None, True)
        elif operation_name(node) != "getitem":
            self._current = (call, value, False)

    def finish(self) -> None:
        if self._current:
            (path, _), value, is_first_of_several = self._current
            call = self._num_calls.get(path, 0)
            self._num_calls[path] = call + 1
            if isinstance(value, tuple):
                self.found.append((path, call, value, is_first_of_several))
        self._current = None


@functools.cache
def _find_integers(operation: Any) -> tuple[str, ...]:
    """The names of the arguments of an operation that are integers, or lists of them."""
    return tuple(a.name for a in find_schema(operation).arguments if str(a.type) in ("int", "List[int]"))


def _module_call(node: Node) -> tuple[str, str]:
    """The path of the module that called an operation, and a name for that call of the module."""
    return node.meta.get("module", ("", ""))


def _shapes(value: Any) -> Any:
    """The shape of a tensor, or a list of shapes; None for anything else."""
    if isinstance(value, Tensor):
        return tuple(map(int, value.shape))
    return [_shapes(entry) for entry in value] if isinstance(value, (list, tuple)) else None


def _sizes(result: Any) -> Any:
    """The same for the axes of a tensor, or a list of those."""
    if isinstance(result, list):
        return [_sizes(entry) for entry in result]
    return tuple(axis.size for axis in result) if isinstance(result, tuple) else None


def _read_constant(node: Node, name: str) -> Any:
    """The axes of a constant: pinned, but uniform where a module keeps a table that it has repeated along an axis.

    One that is the same everywhere may be a state that is not set yet.
    """
    varies, value = Pin("a constant that varies", name), node.meta.get("kept")
    table = value if isinstance(value, Tensor) and not value.is_meta and bool((value != value.flatten()[:1]).any()) else None

    def read(axis: int, size: int) -> AxisTerm:
        is_repeated = size > 1 and table is not None and bool((table == table.narrow(axis, 0, 1)).all())
        return Uniform(size, repeats=True) if is_repeated else pinned(size, varies)

    def convert(shape: Any) -> Any:
        if isinstance(shape, list):
            return [convert(s) for s in shape]
        return None if shape is None else tuple(read(axis, size) for axis, size in enumerate(shape))

    return convert(_shapes(node.meta.get("val")))
