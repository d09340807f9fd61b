"""Networks that differ in the number of their blocks: every block of one beside every block of the other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from onebasin.tensors.states import LazyState, State


@dataclass(frozen=True)
class Stack:
    """Blocks whose keys differ in one number, in two states that are alike otherwise.

    Attributes:
        prefix: what is in front of the number.
        few: the numbers in the state with fewer blocks.
        many: the numbers in the other.
    """

    prefix: str
    few: tuple[int, ...]
    many: tuple[int, ...]

    def rename(self, key: str, shift: int) -> str:
        """The key in the state with more blocks for a key of the other, whose first block is beside the block `shift`."""
        number, rest = _split(key, self.prefix)
        if number is None:
            return key
        return f"{self.prefix}{self.many[(self.few.index(number) + shift) % len(self.many)]}{rest}"

    def view(self, few: State, many: State, shift: int) -> LazyState:
        """The state with more blocks under the keys of the other one."""
        shapes = {key: many.shapes[self.rename(key, shift)].to("meta") for key in few.shapes}
        return LazyState(shapes, functools.partial(self._read, many, shift), many.device)

    def _read(self, many: State, shift: int, key: str) -> Tensor:
        return many[self.rename(key, shift)]


def find_stack(first: State, other: State) -> Stack | None:
    """The stack in which two states differ, if they are alike but for the number of its blocks."""
    if len(first.shapes) > len(other.shapes):
        first, other = other, first
    for prefix in _prefixes(first):
        few, many = (
            sorted({n for key in state.shapes if (n := _split(key, prefix)[0]) is not None}) for state in (first, other)
        )
        if not 0 < len(few) < len(many):
            continue
        stack = Stack(prefix, tuple(few), tuple(many))
        expected = {stack.rename(key, shift) for shift in range(len(many)) for key in first.shapes}
        if expected == other.shapes.keys() and all(
            stack.rename(key, shift) in other.shapes and other.shapes[stack.rename(key, shift)].shape == value.shape
            for shift in range(len(many))
            for key, value in first.shapes.items()
        ):
            return stack
    return None


def _prefixes(state: State) -> Iterator[str]:
    """What is in front of any number in a key."""
    seen = set()
    for key in state.shapes:
        parts = key.split(".")
        for place, part in enumerate(parts):
            prefix = "".join(f"{each}." for each in parts[:place])
            if part.isdigit() and prefix not in seen:
                seen.add(prefix)
                yield prefix


def _split(key: str, prefix: str) -> tuple[int | None, str]:
    """The number after a prefix, and what follows it with its dot; None if there is none."""
    number, dot, rest = key.removeprefix(prefix).partition(".") if key.startswith(prefix) else ("", "", "")
    return (int(number), dot + rest) if number.isdigit() else (None, "")
