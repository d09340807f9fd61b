"""Constants of a recording: tensors that are made while a module runs, or that its modules keep as attributes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from onebasin.programs.failures import NotRecordable
from onebasin.programs.shapes import iterate_leaves, make_empty, map_leaves, written_arguments
from onebasin.programs.snapshots import ModuleSnapshot
from onebasin.torch_internals import memory_id

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors whose operations a recording sees."""


def find_memory(tensor: Tensor) -> int:
    """A number that a tensor shares with its views."""
    if tensor.layout != torch.strided:
        raise NotRecordable(f"it uses a tensor with layout {tensor.layout}")
    return memory_id(tensor)


class ConstantMemory:
    """Where the memory of tensors comes from that are neither parameters, nor buffers of the state, nor inputs (sources)."""

    def __init__(self, sources: Iterable[Tensor], snapshot: ModuleSnapshot):
        self._of_sources = set(map(find_memory, sources))
        self._of_attributes: set[int] | None = None  # found when it is first needed
        self._snapshot = snapshot
        self._made: set[int] = set()
        self._read: set[int] = set()
        self._taken: set[int] = set()
        self._alive: list[Tensor] = []  # an identity is unique among living objects only

    def add(self, result: Any, operands: Iterable[Tensor] = ()) -> Any:
        """Add what an operation made, unless it is a view of an operand. Returns the result."""
        existing = {find_memory(operand) for operand in operands}
        for leaf in iterate_leaves(result):
            if isinstance(leaf, Tensor) and find_memory(leaf) not in existing:
                self._made.add(find_memory(leaf))
                self._alive.append(leaf)
        return result

    def read(self, tensor: Tensor) -> None:
        """Mark a constant that the graph reads: it must not be written any more."""
        self.check(tensor)
        self._read.add(find_memory(tensor))

    def take(self, tensor: Tensor) -> None:
        """Give up a constant that an operation of the graph writes: none of its views may be used as a constant any more."""
        self.check(tensor)
        memory = find_memory(tensor)
        if memory not in self._made - self._read:
            raise NotRecordable("it writes a tensor that existed before, or was read already")
        self._taken.add(memory)

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor that was neither made while recording nor kept by a module: it may come from parameters."""
        memory = find_memory(tensor)
        if memory in self._taken:
            raise NotRecordable("it writes a tensor that has other views")
        if memory in self._made:
            return
        if type(tensor) not in PLAIN or tensor.requires_grad:
            raise NotRecordable(f"it uses a tensor of type {type(tensor).__name__} that is not in the model")
        if memory in self._of_sources:
            raise NotRecordable("it uses a parameter, a buffer or an input through another tensor object")
        if self._of_attributes is None:
            self._of_attributes = {memory_id(kept) for kept in self._snapshot.tensors if kept.layout == torch.strided}
        if memory not in self._of_attributes:
            raise NotRecordable("it uses a tensor of unknown origin")

    def check_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operation that writes a tensor which is not a constant made while recording, or was read already."""
        if positions := written_arguments(func):
            targets = iterate_leaves(([args[i] for i in positions if i < len(args)], kwargs))
            memory = {find_memory(leaf) for leaf in targets if isinstance(leaf, Tensor)}
            if not memory <= self._made - self._read - self._taken:
                raise NotRecordable(f"{func} writes a tensor that existed before, or was read already")


_FILLING = {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar}


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


class Makings:
    """How the constants of a recording were made: a graph of the operations, beside the values.

    Whether a constant is the same along an axis at every call follows from how it was made, not from its values at one call:
    at a single position all rotations of a rotary embedding are one.
    """

    def __init__(self) -> None:
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}
        self._written: set[int] = set()
        self._alive: list[Tensor] = []  # an identity is unique among living objects only

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Add an operation and its result, which is returned. What is written in place is no longer known."""
        if written_arguments(func):
            self._write(func, [leaf for leaf in iterate_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            return result
        node = self._graph.create_node("call_function", func, *map_leaves((args, kwargs), Tensor, self.find))
        node.meta["val"] = map_leaves(result, Tensor, make_empty)
        if isinstance(result, Tensor):
            return self._keep(result, node)
        for number, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
            if isinstance(part, Tensor):
                self._keep(part, self._graph.create_node("call_function", operator.getitem, (node, number)))
        return result

    def add_filled(self, tensor: Tensor) -> Tensor:
        """Add a tensor that has the same number everywhere. It is returned."""
        return self.add(torch.ops.aten.full.default, (list(tensor.shape), 0), {}, tensor)

    def _write(self, func: Any, operands: list[Tensor]) -> None:
        if func is torch.ops.aten.detach_.default:  # changes no entry
            return
        target, *others = operands
        if func in _FILLING and not others and _is_whole(target):
            self._written.discard(find_memory(target))
            self.add_filled(target)
        else:
            self._written.update(map(find_memory, operands))

    def add_opaque(self, tensor: Tensor) -> Tensor:
        """Add a tensor that was made from Python numbers. It is returned."""
        node = self._graph.create_node("placeholder", "numbers")
        node.meta.update(val=make_empty(tensor), numbers=tensor)
        return self._keep(tensor, node)

    def _keep(self, tensor: Tensor, node: Node) -> Tensor:
        node.meta.setdefault("val", make_empty(tensor))
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        return tensor

    def find(self, tensor: Tensor) -> Node:
        """The operation that made a constant; a placeholder for one that a module keeps, or that was written in place."""
        is_written = find_memory(tensor) in self._written
        if is_written or id(tensor) not in self._nodes:
            node = self._graph.create_node("placeholder", "constant")
            node.meta["val"] = make_empty(tensor)
            if is_written:
                return node
            node.meta["kept"] = tensor
            self._keep(tensor, node)
        return self._nodes[id(tensor)]
