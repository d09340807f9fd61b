"""Which tensors of a recording share memory, so that a write to one of them changes the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.programs.constants import find_memory
from onebasin.programs.failures import NotRecordable

_WRITING_BACK = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.alias.default: torch.ops.aten.copy.default,  # a slice that is all of a tensor
}


class Part(NamedTuple):
    """A tensor that is ``view(whole, *args)``, and how to put a new value of it back: ``scatter(whole, part, *args)``."""

    part: Tensor
    whole: Tensor
    view: Any
    scatter: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Views:
    """The tensors that were read or made so far, and the memory of each."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []  # kept: an identity is unique among living objects only
        self._memory: dict[int, object] = {}  # by identity of a tensor: what it shares with its views
        self._num_views: Counter[object] = Counter()
        self._writable: set[object] = set()  # memory of results, which no parameter, buffer or input has
        self._parts: dict[int, Part] = {}
        self._outdated: set[int] = set()

    def add_input(self, tensor: Tensor) -> None:
        """Take in a parameter, a buffer, an input or a constant."""
        self._add(tensor, find_memory(tensor), 1)

    def make_writable(self, tensor: Tensor) -> None:
        """Say that all views of a tensor that may still be read are known."""
        self._writable.add(self._memory[id(tensor)])

    def add_result(self, tensor: Tensor, owner: Tensor | None, has_known_strides: bool) -> None:
        """Take in the result of an operation, which may have the memory of an operand."""
        memory = object() if owner is None else self._memory[id(owner)]
        if owner is None:
            self._writable.add(memory)
        if not has_known_strides:  # what seems to be this very tensor later may be a copy
            self._writable.discard(memory)
        self._add(tensor, memory, 1 if has_known_strides else 2)

    def _add(self, tensor: Tensor, memory: object, count: int) -> None:
        self._tensors.append(tensor)
        self._memory[id(tensor)] = memory
        self._num_views[memory] += count

    def add_part(self, part: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what the result of an operation is a slice of, if it is one."""
        if func in _WRITING_BACK:
            self._parts[id(part)] = Part(part, args[0], func, _WRITING_BACK[func], args[1:], kwargs)

    def iterate_parts(self, part: Tensor) -> Iterator[Part]:
        """Yield what a tensor is a slice of, what that is a slice of, and so on."""
        while id(part) in self._parts:
            found = self._parts[id(part)]
            yield found
            part = found.whole

    def check_read(self, tensor: Tensor) -> None:
        """Refuse a tensor whose memory was written through another view since."""
        if id(tensor) in self._outdated:
            raise NotRecordable("a tensor is read that was written through another view")

    def has_other_views(self, target: Tensor) -> bool:
        """Whether something else has the memory of a tensor."""
        return self._num_views[self._memory[id(target)]] > 1

    def is_writable(self, target: Tensor) -> bool:
        """Whether it is known what a write to a tensor with other views changes."""
        return self._memory[id(target)] in self._writable

    def write(self, target: Tensor) -> Iterator[Part]:
        """Note that a tensor was written: yield the slices to put back, innermost first; other views must not be read."""
        current = {id(target)}
        for found in self.iterate_parts(target):
            yield found
            current.add(id(found.whole))
        memory = self._memory[id(target)]
        self._outdated |= {id(tensor) for tensor in self._tensors if self._memory[id(tensor)] is memory} - current
