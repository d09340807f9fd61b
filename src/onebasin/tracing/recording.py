"""A call of a module, recorded while it runs on tensors without values.

Under `torch.inference_mode` a dispatch mode sees the very operations that a module calls (linear, attention), before they
are taken apart. So one run of the module writes down the graph that an export would, ten times faster. What cannot be
followed this way is left to `torch.export`: values that are read, writes that are seen through another name, other kinds of
tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onebasin.state import read_state
from onebasin.tracing.graph import Call, Program, evaluation_mode, export, fixed_seed, quiet
from onebasin.tracing.precision import Float64, compute_in_float64, promote
from onebasin.tracing.shapes import Shapes, id_of_memory, iterate_leaves, make_empty, map_leaves


def read_program(model: nn.Module, call: Call, confirm: bool = True) -> Program:
    """The operations of one call: recorded if it can be followed, exported otherwise.

    Args:
        model: the module.
        call: its arguments.
        confirm: believe a recording only if it returns what the module does.

    Raises:
        ValueError: if the inputs do not fit the model, or its control flow depends on data.
    """
    with contextlib.suppress(Exception):  # whatever it is, the exporter finds it as well, and says what it is
        program = record(model, call)
        if not confirm or returns_the_same(program, model, call):
            return program
    return export(model, call)


def returns_the_same(program: Program, model: nn.Module, call: Call) -> bool:
    """Whether a program returns what the module does, on the module's own weights.

    It does the same operations in the same order: a difference is a fault. Types of less than 32 bits are promoted; some
    processors cannot do all operations in them. On the meta device a program is believed.
    """
    state = read_state(model)
    values = [v for node in program.graph.nodes for v in iterate_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    types = {value.dtype for value in values if value.is_floating_point()}
    if any(isinstance(v, Tensor) and v.is_meta for v in (*state.values(), *program.given.values())):
        return True
    promoted = any(dtype.itemsize < 4 for dtype in types)
    with evaluation_mode(model), quiet(), _restored(model), torch.inference_mode():
        numbers = fixed_seed() if program.is_random else torch.random.fork_rng(devices=[])
        with numbers, Float64() if promoted else nullcontext():
            result = model(*call.args, **call.kwargs)
        found = program.run(state, compute_in_float64, promote) if promoted else program.run(state)
    expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    # Half of the digits: other kernels may be chosen, such as those of attention, and constants were rounded when recorded.
    tolerance = max((torch.finfo(dtype).eps for dtype in types), default=0.0) ** 0.5
    return len(expected) == len(found) and all(_are_close(e, f, tolerance) for e, f in zip(expected, found, strict=True))


def _are_close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(expected, found)
    scale = float(expected.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def record(model: nn.Module, call: Call) -> Program:
    """Run one call on tensors without values, and write down its operations. The model is left as it was.

    Raises:
        NotFollowed: if only an export can tell what the model does.
    """
    recorder = _Recorder(model, call)
    with contextlib.ExitStack() as stack:
        for context in (evaluation_mode(model), quiet(), _restored(model), torch.random.fork_rng(devices=[])):
            stack.enter_context(context)
        with recorder.noting_modules(), torch.inference_mode(), recorder:
            result = model(*call.args, **call.kwargs)
    return recorder.finish(result)


class NotFollowed(Exception):
    """Something that a recording cannot tell."""


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Whatever attributes the modules set while they run (caches, last activations) are as before afterwards."""
    before = [(m, vars(m).copy(), m._parameters.copy(), m._buffers.copy()) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            attributes["_parameters"].clear()
            attributes["_parameters"].update(parameters)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)
            vars(module).clear()
            vars(module).update(attributes)


class _Result(Tensor):
    """Stands for what an operation returns: a shape, a type and a device."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> _Result:
        with torch.inference_mode(False):  # a view of a plain tensor has to be one
            return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
            )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotFollowed(f"{func} outside of the recording")


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


_MAKERS = {
    getattr(torch.ops.aten, name)
    for name in ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
}


class _Recorder(TorchDispatchMode):
    """Writes every operation on a parameter, a buffer, an input or a result into a graph.

    Operations on nothing of those (masks, positions) are run, and what they return is a constant of the graph.
    """

    def __init__(self, model: nn.Module, call: Call):
        super().__init__()
        self.graph = Graph()
        self.inputs: dict[str, tuple[InputKind, str]] = {}
        self.given: dict[str, Any] = {}
        self._sources = _name_sources(model, call)  # by identity: what a tensor is, before something reads it
        self._constants = {id(buffer): key for key, buffer in model.named_buffers()}  # names of those that are not state
        self._nodes: dict[int, Node] = {}
        self._results: list[Tensor] = []  # kept: an identity is that of a living object
        self._memory: dict[int, object] = {}  # by identity of a tensor: what it shares with its views
        self._num_names: Counter[object] = Counter()
        self._fixed_memory: set[int] = set()
        self._shapes = Shapes()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack: list[tuple[str, str]] = [("", "")]
        self._num_calls: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------- the modules

    @contextlib.contextmanager
    def noting_modules(self) -> Iterator[None]:
        """Within it every operation is noted with the module that calls it."""

        def enter(module: nn.Module, _: Any) -> None:
            path = self._paths.get(id(module), self._stack[-1][0])
            self._num_calls[path] += 1
            self._stack.append((path, f"{path}@{self._num_calls[path]}"))

        def leave(module: nn.Module, *_: Any) -> None:
            self._stack.pop()

        hooks = nn.modules.module
        handles = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ---------------------------------------------------------------------------------------------------- the operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = list(iterate_leaves((args, kwargs)))
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = _written(func)
        if not any(self._is_followed(operand) for operand in operands):
            if written and any(id_of_memory(operand) in self._fixed_memory for operand in operands):
                raise NotFollowed("a constant is written after it was read")
            return func(*args, **kwargs)
        if func.overloadpacket in _MAKERS and not args[0].is_meta:  # reads a shape, no values: what it makes is a constant
            return func(make_empty(args[0], args[0].device), *args[1:], **kwargs)
        if written:
            self._check_write(func, written, args)
        nodes = map_leaves((args, kwargs), Tensor, self._find_node)
        metas, shared = self._shapes.compute(func, nodes)
        node = self.graph.create_node("call_function", func, *nodes)
        node.meta = {"val": metas, "module": self._stack[-1]}
        if written:
            self._nodes[id(args[0])] = node
            return args[0]
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), operands[0].device)
        if isinstance(metas, Tensor):
            return self._add_result(node, device, operands, shared[0])
        results = []
        for number, meta in enumerate(metas):
            if meta is None:
                results.append(None)
                continue
            part = self.graph.create_node("call_function", operator.getitem, (node, number))
            part.meta = {"val": meta, "module": self._stack[-1]}
            results.append(self._add_result(part, device, operands, shared[number]))
        return results

    def _is_followed(self, tensor: Any) -> bool:
        return id(tensor) in self._sources or isinstance(tensor, _Result)

    def _find_node(self, tensor: Tensor) -> Node:
        """The node of a tensor; parameters, buffers, inputs and constants get theirs when they are first read."""
        if id(tensor) not in self._nodes:
            if type(tensor) not in _PLAIN:
                raise NotFollowed(f"a tensor of type {type(tensor).__name__}")
            constant = self._constants.get(id(tensor), f"made for {self._stack[-1][0] or 'the model'}")
            kind, name = self._sources.get(id(tensor), (InputKind.CONSTANT_TENSOR, constant))
            node = self.graph.create_node("placeholder", name)
            node.meta = {"val": self._shapes.of(tensor)}
            self.inputs[node.name] = (kind, name)
            if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                self.given[node.name] = tensor
                self._fixed_memory.add(id_of_memory(tensor))
            self._nodes[id(tensor)] = node
            self._memory[id(tensor)] = id_of_memory(tensor)
            self._num_names[self._memory[id(tensor)]] += 1
        return self._nodes[id(tensor)]

    def _add_result(self, node: Node, device: torch.device, operands: list[Tensor], place: int | None) -> Tensor:
        result = _Result(node.meta["val"], device)
        self._results.append(result)
        self._nodes[id(result)] = node
        self._memory[id(result)] = object() if place is None else self._memory[id(operands[place])]
        self._num_names[self._memory[id(result)]] += 1
        return result

    def _check_write(self, func: Any, written: tuple[int, ...], args: Any) -> None:
        """What is written must be a result that has one name only: then the name stands for the new value from now on."""
        if written != (0,) or torch.Tag.inplace_view in func.tags or not isinstance(args[0], _Result):
            raise NotFollowed(f"{func} writes what is not its own")
        writes_nothing = func is torch.ops.aten.dropout_.default and not args[2]
        if self._num_names[self._memory[id(args[0])]] > 1 and not writes_nothing:
            raise NotFollowed(f"{func} may be seen through another name")

    # ------------------------------------------------------------------------------------------------------------ the end

    def finish(self, result: Any) -> Program:
        """The program; all that the call returned is its output."""
        leaves = pytree.tree_leaves(result)
        if not all(isinstance(leaf, (Tensor, int, float, str, type(None))) for leaf in leaves):
            raise NotFollowed("the model returns something else than tensors")
        self.graph.output(tuple(self._find_node(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        return Program(self.graph, self.inputs, self.given)


def _name_sources(model: nn.Module, call: Call) -> dict[int, tuple[InputKind, str]]:
    """By identity of the tensors: parameters, buffers of the state and inputs."""
    found: dict[int, tuple[InputKind, str]] = {}
    arguments = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    for name, value in arguments.items():
        leaves = pytree.tree_leaves(value)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                found[id(leaf)] = (InputKind.USER_INPUT, name if len(leaves) == 1 else f"{name}_{number}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), (InputKind.PARAMETER if key in parameters else InputKind.BUFFER, key))
    return found


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """Which arguments of an operation are written."""
    arguments = func._schema.arguments if func._schema.is_mutable else ()
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
