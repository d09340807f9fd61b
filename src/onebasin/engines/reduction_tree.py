"""A tree of a fixed shape in which results are combined, so that sums are rounded in the same way whoever computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FAN_IN = 8
"""Results that are combined at a time. It fixes the order of sums, and so their bits, whoever computes them."""


class Tree:
    """Combines results as they come, holding one for each level. Each node has `FAN_IN` neighbours, in their order.

    Args:
        combine: of two neighbours.

    >>> tree = Tree(lambda a, b: f"({a}{b})")
    >>> for letter in "abcdefghij":
    ...     tree.add(letter)
    >>> tree.finish()
    '((((((((ab)c)d)e)f)g)h)(ij))'
    """

    def __init__(self, combine: Callable[[Any, Any], Any]):
        self.combine = combine
        self.levels: list[list[Any]] = []  # of each level the result so far, and how many are in it

    def add(self, result: Any, level: int = 0) -> None:
        """Take the next one."""
        if level == len(self.levels):
            self.levels.append([None, 0])
        held = self.levels[level]
        held[0] = self.combine(held[0], result) if held[1] else result
        held[1] += 1
        if held[1] == FAN_IN:
            self.levels[level] = [None, 0]
            self.add(held[0], level + 1)

    def finish(self) -> Any:
        """The whole."""
        level = 0
        while level < len(self.levels):
            result, count = self.levels[level]
            if count and not any(above[1] for above in self.levels[level + 1 :]):
                return result
            if count:
                self.add(result, level + 1)
            level += 1
        raise ValueError("there is nothing to combine")
