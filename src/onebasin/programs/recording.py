"""A call of a module, recorded while the module runs on tensors without values.

Below autograd a dispatch mode sees the operations that a module calls (linear, attention) before they are split up. So one
run of the module gives the graph that an export would, ten times faster. A recording refuses what it cannot follow: values
that are read, writes that are visible through another tensor, other kinds of tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from onebasin.programs.calls import Call, list_outputs, name_outputs
from onebasin.programs.constants import PLAIN, ConstantMemory, Makings
from onebasin.programs.failures import (
    ModuleFails,
    NeedsValues,
    NotRecordable,
    NotTraceable,
    ReadsValues,
    SwallowedError,
    describe_error,
    find_user_line,
)
from onebasin.programs.graph import FrontEnd, Program
from onebasin.programs.integer_values import IntegerValues
from onebasin.programs.isolation import isolated, run_module
from onebasin.programs.noise import is_random
from onebasin.programs.shapes import (
    MAY_SHARE,
    UNKNOWN_STRIDES,
    Shapes,
    functional_variant,
    is_exact,
    iterate_leaves,
    make_empty,
    map_leaves,
    run_operation,
    written_arguments,
)
from onebasin.programs.snapshots import ModuleSnapshot
from onebasin.programs.views import Views
from onebasin.torch_internals import (
    TorchDispatchMode,
    below_autograd,
    ignore_torch_function,
    is_transformed,
    make_stand_in,
    tree_leaves,
)


def record(model: nn.Module, call: Call, training: bool = False) -> Program:
    """Run one call on tensors without values and record its operations. The model is left as it was.

    Raises:
        NotRecordable: if the call cannot be recorded, or the module fails.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotTraceable(f"the operations of {path or 'the model'}, which is compiled by torch.jit, are not visible")
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise NotTraceable(f"the weights of {path or 'the model'} are quantised and packed")
    with isolated(model, call) as snapshot:
        recorder = _Recorder(model, call, snapshot)
        with contextlib.ExitStack() as stack:
            for context in (recorder.tracking_modules(), torch.no_grad(), below_autograd(), recorder, _ValueGuard(recorder)):
                stack.enter_context(context)
            try:
                result = run_module(model, call, training)
            except Exception as error:
                last = error if isinstance(error, NotRecordable) else ModuleFails(describe_error(error))
                failure = recorder.bug or [*recorder.refusals, last][0]
                raise failure from (None if failure is error else error)
        return recorder.finish(result, training)


class _StandIn(Tensor):
    """Stands for the result of an operation: a shape, a type and a device."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> _StandIn:
        return make_stand_in(cls, like, device)

    __torch_function__ = ignore_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotRecordable(f"{func} is called outside of the recording")


class _ValueGuard(TorchFunctionMode):
    """Refuses functions that take values out of tensors, or replace them, without an operation that a recorder sees.

    Functions whose result depends on the size of a tensor, so that Python code may, are marked.
    """

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recorder.is_busy:
            if func in _BYPASSING:
                self.recorder.refuse(func)
            if func in _DIFFERENTIATING and not any(map(is_transformed, _list_tensors((args, kwargs)))):
                self.recorder.refuse(
                    func, NotTraceable(f"it calls {func.__name__}, which needs values; use torch.func.grad")
                )
            self.recorder.reads_sizes |= func in _READING_SIZES
        if func in _READING:
            given = (*args, *kwargs.values()) if func in _FROM_DATA else [args]
            nested = [leaf for value in given if not isinstance(value, Tensor) for leaf in iterate_leaves(value)]
            followed = [leaf for leaf in nested if self.recorder.is_followed(leaf) and not self.recorder.is_flag(leaf)]
            if followed and not (func in _READING_NUMBERS and all(map(self.recorder.knows, followed))):
                self.recorder.refuse(func)
        return func(*args, **kwargs)


def _named(owner: Any, *names: str) -> set[Any]:
    return {getattr(owner, name) for name in names}


_BYPASSING = _named(Tensor, "numpy", "__array__", "__dlpack__", "__reduce_ex__", "storage", "untyped_storage") | {
    Tensor.data.__set__  # type: ignore[attr-defined]
}
_DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}
_READING_NUMBERS = _named(Tensor, "__float__", "__int__", "__bool__", "__complex__", "__index__")
_READING = _FROM_DATA | _READING_NUMBERS | {Tensor.tolist}
_READING_SIZES = {Tensor.shape.__get__, *_named(Tensor, "size", "numel", "nelement", "__len__", "__iter__")}  # type: ignore
for _owner in (torch, Tensor):
    _READING_SIZES |= _named(_owner, "unbind", "split", "chunk", "tensor_split")
_READING_OPERATIONS = _named(torch.ops.aten, "item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")
_FACTORIES = _named(torch.ops.aten, "new_zeros", "new_ones", "new_full", "new_empty") | _named(
    torch.ops.aten, "zeros_like", "ones_like", "full_like", "empty_like"
)


class _Recorder(TorchDispatchMode):
    """Adds every operation on a parameter, a buffer, an input, a result or random numbers to a graph.

    Operations on nothing of those (masks, positions) are run. Their results are constants of the graph.
    """

    def __init__(self, model: nn.Module, call: Call, snapshot: ModuleSnapshot):
        super().__init__()
        self.graph = Graph()
        self.is_busy = False
        self.reads_sizes = False
        self.bug: Exception | None = None  # an exception of our own code, not of the module
        self._inputs: dict[str, tuple[InputKind, str]] = {}
        self._given: dict[str, Any] = {}
        self.refusals: list[NotRecordable] = []  # a module may catch what is raised, and go on
        self._sources = _name_sources(model, call)  # by identity: what a tensor is, before an operation reads it
        self._constants = ConstantMemory((tensor for tensor, _, _ in self._sources.values()), snapshot)
        self._constant_names = {id(buffer): key for key, buffer in model.named_buffers()}
        self._nodes: dict[int, Node] = {}
        self._written: set[int] = set()  # identities of constants that became results
        self._makings = Makings()
        self._views = Views()
        self._shapes = Shapes()
        self._integers = IntegerValues()
        self._lines: dict[str, None] = {}  # of code that reads values of integers
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._modules: list[tuple[str, str]] = [("", "")]  # those that run now, innermost last: path, name of the call
        self._num_calls: Counter[str] = Counter()

    def refuse(self, func: Any, reason: NotRecordable | None = None) -> None:
        """Stop because of a function that reads or writes values without an operation, or for another reason."""
        # An index is also asked for just to find out what an argument is.
        kind = NotRecordable if func is Tensor.__index__ else ReadsValues
        self.refusals.append(reason or kind(f"{func.__name__} reads or replaces values of a tensor"))
        raise self.refusals[-1]

    @contextlib.contextmanager
    def tracking_modules(self) -> Iterator[None]:
        """Label every operation with the module that calls it. The hooks are global, and ignore other threads."""
        thread = threading.get_ident()

        def enter(module: nn.Module, _: Any) -> None:
            if threading.get_ident() == thread:
                path = self._paths.get(id(module), self._modules[-1][0])
                self._num_calls[path] += 1
                self._modules.append((path, f"{path}@{self._num_calls[path]}"))

        def leave(module: nn.Module, *_: Any) -> None:
            if threading.get_ident() == thread:
                self._modules.pop()

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
            return self._record(func, args, kwargs or {})
        except NotRecordable as error:
            kind = ReadsValues if func.overloadpacket in _READING_OPERATIONS else type(error)
            self.refusals.append(kind(str(error)))
            raise self.refusals[-1] from error
        except Exception as error:
            self.bug = error
            raise
        finally:
            self.is_busy = was_busy

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands = _list_tensors((args, kwargs))
        if func.overloadpacket in _READING_OPERATIONS and all(map(self.is_flag, operands)):
            return run_operation(func, args, kwargs)
        if not is_random(func) and not any(map(self.is_followed, operands)):
            return self._compute_constant(func, args, kwargs, operands)
        if func.overloadpacket in _FACTORIES and not args[0].is_meta:  # reads a shape and no values, so it makes a constant
            made = self._constants.add(run_operation(func, (make_empty(args[0], args[0].device), *args[1:]), kwargs))
            return self._makings.add_filled(made)
        if written_arguments(func):
            return self._write(func, args, kwargs)
        nodes = map_leaves((args, kwargs), Tensor, self._find_node)
        if func.overloadpacket in _READING_OPERATIONS and self._integers.knows(nodes):
            self._note_line(nodes)
            return self._integers.compute(func, nodes)
        metas, shared = self._infer(func, nodes)
        node = self._add_node(func, nodes, metas)
        device = _find_device(func, args, kwargs, operands)
        if isinstance(metas, Tensor):
            result = self._add_result(node, device, operands, 0 if func in MAY_SHARE else shared[0])
            self._views.add_part(result, func, args, kwargs)
            return result
        results = []
        for number, meta in enumerate(metas):
            if meta is None:
                results.append(None)
                continue
            part = self._add_node(operator.getitem, ((node, number), {}), meta)
            results.append(self._add_result(part, device, operands, shared[number]))
        return results

    def _infer(self, func: Any, nodes: Any) -> tuple[Any, Sequence[int | None]]:
        """What an operation returns, and whose memory it shares; at the values of integers if the sizes depend on them."""
        try:
            return self._shapes.compute(func, nodes)
        except NeedsValues:
            if (found := self._integers.compute_sizes(func, nodes)) is None:
                raise
            self._note_line(nodes)
            metas = map_leaves(found, Tensor, self._shapes.of)
            return metas, [None] * (1 if isinstance(metas, Tensor) else len(metas))

    def _note_line(self, nodes: Any) -> None:
        if self._integers.varies(nodes):
            self._lines[find_user_line(traceback.extract_stack())] = None

    def knows(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor that is followed are known, because they follow from integers of the call."""
        return self._integers.knows(self._find_node(tensor))

    def is_followed(self, tensor: Any) -> bool:
        """Whether something is a parameter, a buffer of the state, an input, or a result (also in what was a constant)."""
        return isinstance(tensor, _StandIn) or id(tensor) in self._sources or id(tensor) in self._written

    def is_flag(self, tensor: Tensor) -> bool:
        """Whether something is a single integer or bool of the state: no input changes it, and no permutation moves it."""
        is_known = is_exact(tensor) and not tensor.is_meta
        return is_known and tensor.numel() == 1 and self._sources.get(id(tensor), (None, None))[1] == InputKind.BUFFER

    def _add_node(self, func: Any, nodes: Any, metas: Any) -> Node:
        node = self.graph.create_node("call_function", func, *nodes)
        node.meta = {"val": metas, "module": self._modules[-1]}
        self._integers.add(node)
        return node

    def _find_node(self, tensor: Tensor) -> Node:
        """The node of a tensor. Parameters, buffers, inputs and constants get theirs when they are first read."""
        self._views.check_read(tensor)
        if id(tensor) not in self._nodes:
            if id(tensor) in self._sources:
                _, kind, name = self._sources[id(tensor)]
            else:
                self._constants.read(tensor)
                kind = InputKind.CONSTANT_TENSOR
                name = self._constant_names.get(id(tensor), f"made for {self._modules[-1][0] or 'the model'}")
            self._add_input(tensor, kind, name)
        return self._nodes[id(tensor)]

    def _add_input(self, tensor: Tensor, kind: InputKind, name: str) -> None:
        node = self.graph.create_node("placeholder", name)
        node.meta = {"val": self._shapes.of(tensor)}
        if kind == InputKind.CONSTANT_TENSOR:
            node.meta["making"] = self._makings.find(tensor)
        self._inputs[node.name] = (kind, name)
        self._integers.add_input(node, kind, tensor)
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            self._given[node.name] = tensor
        self._nodes[id(tensor)] = node
        self._views.add_input(tensor)

    def _add_result(self, node: Node, device: torch.device, operands: list[Tensor], shared: int | None) -> Tensor:
        result = _StandIn(node.meta["val"], device)
        self._nodes[id(result)] = node
        self._views.add_result(result, None if shared is None else operands[shared], node.target not in UNKNOWN_STRIDES)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Record the functional variant. The target must be a result, a constant made while recording, or a slice of those.

        Its node is the new value's from then on.
        """
        target, variant = args[0] if args else None, functional_variant(func)
        if written_arguments(func) != (0,) or variant is None or not isinstance(target, Tensor):
            raise NotRecordable(f"{func} has no variant that writes nothing")
        if id(target) in self._sources:
            raise NotRecordable(f"{func} writes a tensor that is not the result of an operation")
        if not self.is_followed(target):
            if is_random(func):
                raise NotRecordable(f"{func} fills a tensor with random numbers")
            self._take_constant(target)
        writes_nothing = func is torch.ops.aten.dropout_.default and not args[2]
        has_views = self._views.has_other_views(target) and not writes_nothing
        if has_views and not self._views.is_writable(target):
            raise NotRecordable(f"{func} writes a tensor that has other views")
        nodes = map_leaves((args, kwargs), Tensor, self._find_node)
        before, (after, _) = self._nodes[id(target)].meta["val"], self._shapes.compute(variant, nodes)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise NotRecordable(f"{func} casts what it writes")
        self._nodes[id(target)] = self._add_node(variant, nodes, before)
        for found in self._views.write(target) if has_views else ():
            value = self._find_node(found.whole)
            nodes = (value, self._nodes[id(found.part)], *found.args), found.kwargs
            self._nodes[id(found.whole)] = self._add_node(found.scatter, nodes, value.meta["val"])
        return target

    def _take_constant(self, target: Tensor) -> None:
        """Make a constant that is about to be written a node, such as zeros that something is added to.

        If it is a slice, then all of the constant becomes a node, and the slice is an operation on it.
        """
        self._constants.take(target)
        slices = list(self._views.iterate_parts(target))
        whole = slices[-1].whole if slices else target
        self._add_input(whole, InputKind.CONSTANT_TENSOR, f"made for {self._modules[-1][0] or 'the model'}")
        self._views.make_writable(whole)
        for found in reversed(slices):
            nodes = (self._nodes[id(found.whole)], *found.args), found.kwargs
            self._nodes[id(found.part)] = self._add_node(found.view, nodes, self._shapes.of(found.part))
            self._views.add_result(found.part, found.whole, True)
        self._written |= {id(whole), *(id(found.part) for found in slices)}

    def _compute_constant(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Any:
        if func is torch.ops.aten.lift_fresh.default:  # made from Python numbers or an array, which may be written later
            return self._makings.add_opaque(self._constants.add(args[0].clone()))
        for operand in operands:
            self._constants.check(operand)
        self._constants.check_write(func, args, kwargs)
        result = self._constants.add(run_operation(func, args, kwargs), operands)
        self._views.add_part(result, func, args, kwargs)
        return self._makings.add(func, args, kwargs, result)

    def finish(self, result: Any, training: bool) -> Program:
        """The program. Its outputs are all tensors that the call returned."""
        leaves = list_outputs(result)
        if self.bug is not None:
            raise self.bug
        if self.refusals:
            raise (SwallowedError if any(isinstance(r, ReadsValues) for r in self.refusals) else NotRecordable)(
                str(self.refusals[0])
            )
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, int, float, str, type(None))):
                raise NotRecordable(f"it returns a {type(leaf).__name__}, which is no tensor")
        self.graph.output(tuple(self._find_node(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        named = zip(name_outputs(result), leaves, strict=True)
        return Program(
            self.graph,
            self._inputs,
            self._given,
            FrontEnd("recording"),
            training,
            self.reads_sizes,
            lines_reading_integers=tuple(self._lines),
            output_names=tuple(name for name, leaf in named if isinstance(leaf, Tensor)),
        )


def _list_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in iterate_leaves(values) if isinstance(leaf, Tensor)]


def _name_sources(model: nn.Module, call: Call) -> dict[int, tuple[Tensor, InputKind, str]]:
    """Parameters, buffers of the state and inputs by their identities. The dict keeps them alive."""
    found: dict[int, tuple[Tensor, InputKind, str]] = {}
    try:
        arguments = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError) as error:
        raise ModuleFails(f"its forward does not take them: {error}") from error
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
                raise NotRecordable(f"{key} is given as an input")
    for tensor, _, name in found.values():
        if type(tensor) not in PLAIN or tensor.layout != torch.strided:
            raise NotRecordable(f"{name} is a tensor of type {type(tensor).__name__} with layout {tensor.layout}")
    for name, value in parameters.items():
        if id(value) not in found:
            raise NotRecordable(f"the parameter {name} is not in the state dict")
    return found


def _find_device(func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> torch.device:
    """The device of a result: an argument, or the device of the operands. Scalars may be on another device."""
    asked = next((leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, torch.device)), None)
    if asked is not None:
        return asked
    if func in (torch.ops.aten.to.other, torch.ops.aten.type_as.default):
        return operands[1].device
    return next((operand.device for operand in operands if operand.dim()), operands[0].device)
