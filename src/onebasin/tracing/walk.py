"""One walk over a graph: every operation's rule constrains the axes of the tensors it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.symmetries import Pin
from onebasin.torch_internals import find_schema
from onebasin.tracing.axes import unification
from onebasin.tracing.axes.scopes import enforce
from onebasin.tracing.axes.terms import ONE, Atom, Axes, Same, Unknown, leaves

Rule = Callable[["Trace", dict[str, Any]], Any]
"""Takes the arguments by schema name, tensors as `Axes`; returns the axes of the result, or a list of those."""


class Trace:
    """What is known so far: the axes of every parameter, and what the operations asked for."""

    def __init__(self) -> None:
        self.state: dict[str, Axes] = {}
        self.reached: set[str] = set()
        self.scopes: list[Axes] = []
        self.units: dict[tuple[str, ...], Unknown] = {}
        self.outputs: list[Unknown] = []
        self.modules: list[tuple[str, int, Axes, bool]] = []
        self.why = Pin("model input")

    def pin(self, *axes: Unknown, reason: str = "") -> None:
        """Forbid axes to move, because of the current operation."""
        why = Pin(reason or self.why.reason, self.why.operation, self.why.module)
        for axis in axes:
            unification.pin(axis, why)

    def pinned(self, size: int, reason: str) -> Unknown:
        """A new axis that cannot move."""
        return unification.pinned(size, Pin(reason, self.why.operation, self.why.module))

    def join(self, *axes: Unknown) -> Unknown:
        """Make axes equal; those of size one are broadcast and do not count. Returns the result."""
        wide = [a for a in axes if a.size != 1]
        result = wide[0] if wide else ONE
        for other in wide[1:]:
            result = unification.join(result, other, self.why)
        return result

    def join_axes(self, *tensors: Sequence[Unknown]) -> Axes:
        """Make tensors of one shape equal, axis by axis, parents before children."""
        result = list(tensors[0])
        for other in tensors[1:]:
            result = unification.join_all(zip(result, other, strict=True), self.why)
        return tuple(result)

    def split(self, axis: Unknown, inner: int) -> tuple[Unknown, Unknown]:
        """An axis as a product (outer, inner); pinned where its structure does not allow that."""
        halves = unification.split(axis, inner)
        if halves is not None:
            return halves
        self.pin(axis, reason="reshaped across its structure")
        return self.pinned(axis.size // inner, "reshaped across its structure"), self.pinned(
            inner, "reshaped across its structure"
        )

    def scope(self, *axes: Unknown) -> None:
        """Say that these axes line up in one operation, and nothing else does."""
        wide = tuple(a for a in axes if a.size != 1)
        self.scopes.append(wide)
        enforce(wide)


@dataclass(frozen=True)
class Walker:
    """Runs the rules over programs."""

    trace: Trace
    rules: dict[str, Rule]
    pointwise: Rule
    aliases: dict[str, str]
    statistics: set[str]

    def run(self, program: Program) -> None:
        """Walk one program, in order."""
        values: dict[Node, Any] = {}
        static: set[Node] = set()
        calls = _ModuleCalls(self.trace)
        for node in program.graph.nodes:
            self.trace.why = Pin("", _operation(node), _module(node)[0])
            if node.op == "placeholder":
                values[node] = self._placeholder(program, node)
                if program.inputs[node.name][0] == InputKind.PARAMETER:
                    static.add(node)
            elif node.op == "call_function":
                values[node] = self._call(node, values)
                operands = [n for n in node.all_input_nodes if n in values]
                if operands and all(n in static for n in operands):
                    static.add(node)
                else:
                    self._count_units(node, operands, static, values)
                calls.saw(node, values[node])
            elif node.op == "output":
                self._output(node, values)
            else:
                values[node] = None
        calls.finish()

    def _placeholder(self, program: Program, node: Node) -> Any:
        kind, name = program.inputs[node.name]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape = tuple(int(n) for n in value.shape)
        if kind == InputKind.USER_INPUT:
            return tuple(unification.pinned(n, Pin("model input", name)) for n in shape)
        if kind == InputKind.PARAMETER or (kind == InputKind.BUFFER and _is_statistic(node, self.statistics)):
            key = self.aliases.get(name, name)
            if node.users:
                self.trace.reached.add(key)
            if key not in self.trace.state:
                self.trace.state[key] = tuple(ONE if n == 1 else Atom(n) for n in shape)
                self.trace.scopes.append(self.trace.state[key])
            return self.trace.state[key]
        if kind == InputKind.BUFFER:
            axes = tuple(unification.pinned(n, Pin("a buffer that is no norm's statistic", name)) for n in shape)
            self.trace.state.setdefault(self.aliases.get(name, name), axes)
            return axes
        return self._constant(program.given.get(node.name), shape, name)

    def _constant(self, value: Any, shape: tuple[int, ...], name: str) -> Axes:
        def axis(number: int, size: int) -> Unknown:
            if size == 1:
                return ONE
            return Same(size) if _is_constant_along(value, number) else unification.pinned(size, varies)

        varies = Pin("a constant that varies", name)
        return tuple(axis(number, size) for number, size in enumerate(shape))

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        if _operation(node) == "getitem":
            return values[node.args[0]][node.args[1]]  # type: ignore[index]
        if not getattr(find_schema(node.target), "returns", True):
            return None  # a check at run time
        rule = self._find_rule(node)
        shapes = _shapes(node)
        result = None
        if rule is not None:
            try:
                result = rule(self.trace, _arguments(node, values))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                result = None
                self.trace.why = Pin(f"the rule does not cover this use: {error}", *self._where())
        if result is None or not _fits(result, shapes):
            result = self._refuse(node, values, shapes)
        for axes in _tensors(result):
            self.trace.scope(*axes)
        for argument in _tensors([values[n] for n in node.all_input_nodes if n in values]):
            enforce(tuple(a for a in argument if a.size != 1))
        return result

    def _where(self) -> tuple[str, str]:
        return self.trace.why.operation, self.trace.why.module

    def _find_rule(self, node: Node) -> Rule | None:
        name = _operation(node)
        if name in self.rules:
            return self.rules[name]
        if name.endswith("_") and not name.endswith("__") and name[:-1] in self.rules:
            return self.rules[name[:-1]]
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
            return self.pointwise
        return None

    def _refuse(self, node: Node, values: dict[Node, Any], shapes: Any) -> Any:
        """No rule: pin all that the operation touches."""
        reason = self.trace.why.reason or "no rule for this operation"
        for axes in _tensors([values[n] for n in node.all_input_nodes if n in values]):
            self.trace.pin(*axes, reason=reason)

        def fresh(shape: Any) -> Any:
            if isinstance(shape, list):
                return [fresh(s) for s in shape]
            return None if shape is None else tuple(self.trace.pinned(n, reason) for n in shape)

        return fresh(shapes)

    def _output(self, node: Node, values: dict[Node, Any]) -> None:
        self.trace.why = Pin("model output", "output")
        for result in node.all_input_nodes:
            for axes in _tensors(values[result]):
                self.trace.outputs += axes
                self.trace.pin(*axes, reason="model output")

    def _count_units(self, node: Node, operands: list[Node], static: set[Node], values: dict[Node, Any]) -> None:
        """Note the output channels of an operation between an activation and weights."""
        names = tuple(n.name for n in operands if n in static)
        if not names or _operation(node) not in WEIGHT_OPERATIONS:
            return
        weights = {a for n in operands if n in static for axes in _tensors(values[n]) for t in axes for a in leaves(t)}
        inputs = {a for n in operands if n not in static for axes in _tensors(values[n]) for t in axes for a in leaves(t)}
        for number, term in enumerate(values[node]):
            found = set(leaves(term))
            if found and found <= weights and not found & inputs:
                self.trace.units[(*names, str(number))] = term


WEIGHT_OPERATIONS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"}
"""Operations whose output channels are told from their operands; rules of others note them in `Trace.units`."""


class _ModuleCalls:
    """Notes the result of every call of a leaf module: the last operation that ran inside it.

    Where that operation has several results (a recurrent layer) the first is noted, with a mark.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.counts: dict[str, int] = {}
        self.current: tuple[tuple[str, str], Any, bool] | None = None

    def saw(self, node: Node, value: Any) -> None:
        call = _module(node)
        if self.current and self.current[0] != call:
            self.finish()
        if isinstance(value, list):
            self.current = (call, value[0], True)
        elif _operation(node) != "getitem":
            self.current = (call, value, False)

    def finish(self) -> None:
        if self.current:
            (path, _), value, several = self.current
            call = self.counts.get(path, 0)
            self.counts[path] = call + 1
            if isinstance(value, tuple):
                self.trace.modules.append((path, call, value, several))
        self.current = None


def _operation(node: Node) -> str:
    schema = find_schema(node.target)
    if schema is not None:
        return schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def _module(node: Node) -> tuple[str, str]:
    """The path of the module that called an operation, and which call of it that was."""
    return node.meta.get("module", ("", ""))


def _arguments(node: Node, values: dict[Node, Any]) -> dict[str, Any]:
    """The arguments by schema name, defaults filled in, `self` called `input`."""
    schema = find_schema(node.target)
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    bound = {}
    for argument in schema.arguments:
        value = given.get(argument.name, argument.default_value if argument.has_default_value() else None)
        name = "input" if argument.name == "self" else argument.name
        bound[name] = map_arg(value, lambda n: values[n])
    bound["node"] = node
    return bound


def _shapes(node: Node) -> Any:
    def shape(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(int(n) for n in value.shape)
        if isinstance(value, (list, tuple)):
            return [shape(v) for v in value]
        return None

    return shape(node.meta.get("val"))


def _fits(result: Any, shapes: Any) -> bool:
    if isinstance(shapes, list):
        return isinstance(result, list) and all(_fits(r, s) for r, s in zip(result, shapes, strict=True))
    if shapes is None or not isinstance(result, tuple):
        return shapes is None and result is None
    return tuple(axis.size for axis in result) == shapes


def _tensors(value: Any) -> Iterable[Axes]:
    if isinstance(value, tuple):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _tensors(entry)


def _is_statistic(node: Node, statistics: set[str]) -> bool:
    """Whether a buffer is read as the running mean or variance of a norm, and as nothing else."""
    for user in node.users:
        if user.op != "call_function" or _operation(user) not in statistics:
            return False
        schema = find_schema(user.target)
        roles = dict(zip((a.name for a in schema.arguments), user.args, strict=False)) | dict(user.kwargs)
        if any(value is node and name not in ("running_mean", "running_var") for name, value in roles.items()):
            return False
    return True


def _is_constant_along(constant: Any, axis: int) -> bool:
    if not isinstance(constant, Tensor) or constant.is_meta or constant.numel() == 0:
        return False
    return bool((constant == constant.narrow(axis, 0, 1)).all())
