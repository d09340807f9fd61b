"""A call of a module, recorded while it runs on tensors without values.

Below autograd a dispatch mode sees the very operations that a module calls (linear, attention), before they
are taken apart. So one run of the module writes down the graph that an export would, ten times faster. What cannot be
followed this way is refused: values that are read, writes that are seen through another name, other kinds of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from onebasin.programs.graph import Call, Program, evaluation_mode, quiet
from onebasin.programs.shapes import (
    MAY_SHARE,
    OTHER_STRIDES,
    Shapes,
    is_random,
    iterate_leaves,
    make_empty,
    map_leaves,
    without_writing,
    written,
)
from onebasin.programs.snapshots import Belongings
from onebasin.torch_internals import (
    TorchDispatchMode,
    below_autograd,
    ignore_torch_function,
    make_stand_in,
    memory_id,
    tree_leaves,
    tree_map,
)


def record(model: nn.Module, call: Call) -> Program:
    """Run one call on tensors without values, and write down its operations. The model is left as it was.

    Raises:
        NotFollowed: if only an export can tell what the model does.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise NotFollowed("compiled code may run without operations that are seen")
    belongings = Belongings(model, tree_leaves((call.args, call.kwargs)))
    recorder = _Recorder(model, call, belongings)
    args, kwargs = tree_map(lambda leaf: leaf, (call.args, call.kwargs))  # lists and dicts that may be written into
    with contextlib.ExitStack() as stack:
        for context in (
            evaluation_mode(model),
            quiet(),
            belongings.restored(),
            torch.random.fork_rng(devices=[]),
            recorder.noting_modules(),
            torch.no_grad(),
            below_autograd(),  # where operations are still whole
            recorder,
            _Watch(recorder),
        ):
            stack.enter_context(context)
        result = model(*args, **kwargs)
    return recorder.finish(result)


class NotFollowed(Exception):
    """Something that a recording cannot tell."""


class Caught(NotFollowed):
    """The model was told that there are no values to read, and went on otherwise. It would do so in an export."""


class _Result(Tensor):
    """Stands for what an operation returns: a shape, a type and a device."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> _Result:
        return make_stand_in(cls, like, device)

    __torch_function__ = ignore_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotFollowed(f"{func} outside of the recording")


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


_MAKERS = {
    getattr(torch.ops.aten, name)
    for name in ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
}


_VALUES = {getattr(torch.ops.aten, name) for name in ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")}


class _Watch(TorchFunctionMode):
    """Refuses what takes values out of tensors, or puts others in, without an operation that a recorder sees."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recorder.is_busy and func in _UNSEEN:
            self.recorder.refuse(func)
        if func in _READS:
            given = (*args, *kwargs.values()) if func in _FROM_DATA else [args]
            nested = [leaf for value in given if not isinstance(value, Tensor) for leaf in iterate_leaves(value)]
            if any(map(self.recorder.is_followed, nested)):
                self.recorder.refuse(func)
        return func(*args, **kwargs)


_UNSEEN = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.data.__set__,  # type: ignore[attr-defined]
}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}
_READS = _FROM_DATA | {
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__complex__,
    Tensor.__index__,
    Tensor.tolist,
}


class _Recorder(TorchDispatchMode):
    """Writes every operation on a parameter, a buffer, an input, a result or chance into a graph.

    Operations on nothing of those (masks, positions) are run, and what they return is a constant of the graph.
    """

    def __init__(self, model: nn.Module, call: Call, belongings: Belongings):
        super().__init__()
        self.graph = Graph()
        self.inputs: dict[str, tuple[InputKind, str]] = {}
        self.given: dict[str, Any] = {}
        self.is_busy = False
        self._refusals: list[str] = []  # a model may catch what is raised, and go on
        self._reads_values = False
        self._sources = _name_sources(model, call)  # by identity: what a tensor is, before something reads it
        self._source_memory = {memory_id(tensor) for tensor, _, _ in self._sources.values()}
        self._belongings = belongings
        self._constants = {id(buffer): key for key, buffer in model.named_buffers()}  # names of those that are not state
        self._nodes: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # an identity is that of a living object
        self._memory: dict[int, object] = {}  # by identity of a tensor: what it shares with its views
        self._num_names: Counter[object] = Counter()
        self._made_memory: set[int] = set()  # of constants that were made while recording
        self._read_memory: set[int] = set()  # of constants that the graph reads
        self._shapes = Shapes()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack: list[tuple[str, str]] = [("", "")]
        self._num_calls: Counter[str] = Counter()

    def refuse(self, func: Any) -> None:
        """Give up, for something that reads or writes values without an operation."""
        self._refusals.append(f"{func.__name__} is no operation")
        self._reads_values |= func is not Tensor.__index__  # which is also asked for to tell what an argument is
        raise NotFollowed(self._refusals[-1])

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
        handles = hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # ---------------------------------------------------------------------------------------------------- the operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        was_busy, self.is_busy = self.is_busy, True
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            self._refusals.append(str(error))
            self._reads_values |= func.overloadpacket in _VALUES
            raise
        finally:
            self.is_busy = was_busy

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not is_random(func) and not any(map(self.is_followed, operands)):
            return self._compute(func, args, kwargs, operands)
        if func.overloadpacket in _MAKERS and not args[0].is_meta:  # reads a shape, no values: what it makes is a constant
            return self._own(func(make_empty(args[0], args[0].device), *args[1:], **kwargs))
        if written(func):
            return self._write(func, args, kwargs)
        nodes = map_leaves((args, kwargs), Tensor, self._find_node)
        metas, shared = self._shapes.compute(func, nodes)
        node = self._add_node(func, nodes, metas)
        device = _find_device(func, args, kwargs, operands)
        if isinstance(metas, Tensor):
            return self._add_result(node, device, operands, 0 if func in MAY_SHARE else shared[0])
        results = []
        for number, meta in enumerate(metas):
            if meta is None:
                results.append(None)
                continue
            part = self._add_node(operator.getitem, ((node, number), {}), meta)
            results.append(self._add_result(part, device, operands, shared[number]))
        return results

    def is_followed(self, tensor: Any) -> bool:
        """Whether something is a parameter, a buffer of the state, an input, or a result."""
        return id(tensor) in self._sources or isinstance(tensor, _Result)

    def _add_node(self, func: Any, nodes: Any, metas: Any) -> Node:
        node = self.graph.create_node("call_function", func, *nodes)
        node.meta = {"val": metas, "module": self._stack[-1]}
        return node

    def _find_node(self, tensor: Tensor) -> Node:
        """The node of a tensor; parameters, buffers, inputs and constants get theirs when they are first read."""
        if id(tensor) not in self._nodes:
            if id(tensor) in self._sources:
                _, kind, name = self._sources[id(tensor)]
            else:
                self._check_origin(tensor)
                kind = InputKind.CONSTANT_TENSOR
                name = self._constants.get(id(tensor), f"made for {self._stack[-1][0] or 'the model'}")
                self._read_memory.add(memory_id(tensor))
            node = self.graph.create_node("placeholder", name)
            node.meta = {"val": self._shapes.of(tensor)}
            self.inputs[node.name] = (kind, name)
            if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                self.given[node.name] = tensor
            self._nodes[id(tensor)] = node
            self._memory[id(tensor)] = memory_id(tensor)
            self._num_names[self._memory[id(tensor)]] += 1
        return self._nodes[id(tensor)]

    def _add_result(self, node: Node, device: torch.device, operands: list[Tensor], place: int | None) -> Tensor:
        result = _Result(node.meta["val"], device)
        self._alive.append(result)
        self._nodes[id(result)] = node
        self._memory[id(result)] = object() if place is None else self._memory[id(operands[place])]
        self._num_names[self._memory[id(result)]] += 2 if node.target in OTHER_STRIDES else 1
        return result

    def _write(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """What is written must be a result that has one name only: then the name stands for the new value from now on."""
        target, pure = args[0] if args else None, without_writing(func)
        if written(func) != (0,) or pure is None or not isinstance(target, _Result):
            raise NotFollowed(f"{func} writes what is not its own")
        writes_nothing = func is torch.ops.aten.dropout_.default and not args[2]
        if self._num_names[self._memory[id(target)]] > 1 and not writes_nothing:
            raise NotFollowed(f"{func} may be seen through another name")
        nodes = map_leaves((args, kwargs), Tensor, self._find_node)
        before, (after, _) = self._nodes[id(target)].meta["val"], self._shapes.compute(pure, nodes)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise NotFollowed(f"{func} casts what it writes")
        self._nodes[id(target)] = self._add_node(pure, nodes, before)
        return target

    # ----------------------------------------------------------------------------------------------------- the constants

    def _compute(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Any:
        if func is torch.ops.aten.lift_fresh.default:  # of numbers, whose array may be somebody's
            return self._own(args[0].clone())
        for operand in operands:
            self._check_origin(operand)
        if places := written(func):
            targets = iterate_leaves(([args[i] for i in places if i < len(args)], kwargs))
            memory = {memory_id(leaf) for leaf in targets if isinstance(leaf, Tensor)}
            if not memory <= self._made_memory - self._read_memory:
                raise NotFollowed(f"{func} writes what was there before, or was read")
        return self._own(func(*args, **kwargs), operands)

    def _own(self, result: Any, operands: Iterable[Tensor] = ()) -> Any:
        """Note what was made, unless it is a view of an operand."""
        there = {memory_id(operand) for operand in operands}
        for leaf in iterate_leaves(result):
            if isinstance(leaf, Tensor) and memory_id(leaf) not in there:
                self._made_memory.add(memory_id(leaf))
                self._alive.append(leaf)
        return result

    def _check_origin(self, tensor: Tensor) -> None:
        """A constant is made while recording, or an attribute; what else there is may come from parameters, unseen."""
        memory = memory_id(tensor)
        if memory in self._made_memory:
            return
        if type(tensor) not in _PLAIN or tensor.requires_grad:
            raise NotFollowed(f"a tensor of type {type(tensor).__name__} that is not of the model")
        if memory in self._source_memory:
            raise NotFollowed("a parameter, a buffer or an input, seen as another tensor")
        if memory not in self._attribute_memory:
            raise NotFollowed("a tensor of unknown origin")

    @functools.cached_property
    def _attribute_memory(self) -> set[int]:
        return {memory_id(tensor) for tensor in self._belongings.tensors}

    # ------------------------------------------------------------------------------------------------------------ the end

    def finish(self, result: Any) -> Program:
        """The program; all that the call returned is its output."""
        leaves = tree_leaves(result)
        if self._refusals:
            raise (Caught if self._reads_values else NotFollowed)(self._refusals[0])
        if not all(isinstance(leaf, (Tensor, int, float, str, type(None))) for leaf in leaves):
            raise NotFollowed("the model returns something else than tensors")
        self.graph.output(tuple(self._find_node(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        return Program(self.graph, self.inputs, self.given)


def _name_sources(model: nn.Module, call: Call) -> dict[int, tuple[Tensor, InputKind, str]]:
    """By identity of the tensors: parameters, buffers of the state and inputs, which are kept alive by it."""
    found: dict[int, tuple[Tensor, InputKind, str]] = {}
    arguments = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    for argument, value in arguments.items():
        leaves = tree_leaves(value)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                name = argument if len(leaves) == 1 else f"{argument}_{number}"
                found[id(leaf)] = (leaf, InputKind.USER_INPUT, name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            kind = InputKind.PARAMETER if key in parameters else InputKind.BUFFER
            if found.setdefault(id(value), (value, kind, key))[1] == InputKind.USER_INPUT:
                raise NotFollowed(f"{key} is given as an input")
    if any(type(tensor) not in _PLAIN for tensor, _, _ in found.values()):
        raise NotFollowed("tensors of other types")
    if any(id(value) not in found for value in parameters.values()):
        raise NotFollowed("a parameter that is not in the state")
    return found


def _find_device(func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> torch.device:
    """Where a result is: where it is asked to be, or where the operands are; a number may be elsewhere."""
    asked = next((leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, torch.device)), None)
    if asked is not None:
        return asked
    if func in (torch.ops.aten.to.other, torch.ops.aten.type_as.default):
        return operands[1].device
    return next((operand.device for operand in operands if operand.dim()), operands[0].device)
