"""The interface of an engine, and the one that works in this process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from onebasin.engines.clock import Seconds, recording
from onebasin.engines.journal import Journal, Values
from onebasin.engines.memory_limits import Need, check_memory
from onebasin.tensors.states import State

Item = TypeVar("Item")
Result = TypeVar("Result")
FAN_IN = 8
"""Results that are combined at a time. It fixes the order of sums, and so their bits, whoever computes them."""


class Engine(ABC):
    """Maps functions over items, and combines results.

    Functions are known by their names, or are ``functools.partial`` of such; they and the items are sent to workers.

    Attributes:
        name: by which `make_engine` knows it.
        is_apart: whether workers are other processes, which read files themselves.
        workers: how many work at a time.
        memory: bytes that all processes on this machine may hold; what is free if None.
        journal: where results are kept for a run that goes on after it was killed, if anywhere.
        seconds: where the time went, summed over workers, by what it was spent on.
        notes: what the work needs.
    """

    name: ClassVar[str]
    is_apart: ClassVar[bool] = True

    def __init__(self, workers: int = 1, memory: int | None = None):
        if workers < 1:
            raise ValueError(f"workers must be a whole number of at least 1, got {workers}")
        self.workers, self.memory = workers, memory
        self.journal: Journal | None = None
        self.seconds: Seconds = {}
        self.notes: list[str] = []

    @abstractmethod
    def _run(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Seconds]]:
        """Results in the order of the items, with where their time went; few items are under way at a time."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``function(item)`` for each item, in order.

        Items are taken while results are used: a generator of items may look at earlier results, but not rely on them.
        """
        for result, seconds in self._run(function, items):
            self.add_seconds(seconds)
            yield result

    def map_remembered(self, function: Callable[[Item], Values], items: Sequence[Item]) -> Iterator[Values]:
        """The same, with results that are kept in the journal, and taken from it if they are there."""
        if self.journal is None:
            yield from self.map(function, items)
            return
        numbers = [self.journal.next() for _ in items]
        recalled = [self.journal.recall(number) for number in numbers]
        found = self.map(function, [item for item, known in zip(items, recalled, strict=True) if known is None])
        for number, known in zip(numbers, recalled, strict=True):
            if known is None:
                known = next(found)
                self.journal.keep(number, known)
            yield known

    def remember(self, compute: Callable[[], Values]) -> Values:
        """What `compute` returns, kept in the journal, or taken from it."""
        if self.journal is None:
            return compute()
        number = self.journal.next()
        known = self.journal.recall(number)
        if known is None:
            known = compute()
            self.journal.keep(number, known)
        return known

    def reduce(
        self, function: Callable[[Item], Result], items: Sequence[Item], combine: Callable[[Result, Result], Result]
    ) -> Result:
        """Combine ``function(item)`` of all items in a tree, in which each node takes `FAN_IN` neighbours, in order."""
        tree = Tree(combine)
        for result in self.map(function, items):
            tree.add(result)
        return tree.finish()

    @contextlib.contextmanager
    def hold(self, *values: Any) -> Iterator[None]:
        """Inside, these values are sent to each worker once, wherever they occur in functions and items."""
        yield

    def check_states(self, states: Mapping[str, State]) -> None:
        """Refuse states that workers cannot read, by what messages call them.

        Raises:
            ValueError: saying why, and what to do.
        """
        return

    def check_memory(self, need: Need) -> None:
        """Refuse work that does not fit into memory.

        Raises:
            ValueError: with what it needs, and what there is.
        """
        said = check_memory(need, self.workers, self.is_apart, self.memory)
        if said not in self.notes:
            self.notes.append(said)

    def add_seconds(self, seconds: Seconds) -> None:
        """Count time that was spent."""
        for what, each in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + each

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this process does inside, beside its workers: not the time it waits for them."""
        with recording() as seconds:
            yield
        self.add_seconds({what: each for what, each in seconds.items() if what not in ("wait", "other")})

    def close(self) -> None:
        """End the workers."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tree:
    """Combines results as they come, holding one for each level.

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


class LocalEngine(Engine):
    """Works in this process, one item after another, with PyTorch's threads.

    Args:
        memory: bytes that this process may hold; what is free if None.
        is_checked: whether work that does not fit into memory is refused.
    """

    name = "local"
    is_apart = False

    def __init__(self, memory: int | None = None, is_checked: bool = True):
        super().__init__(1, memory)
        self.is_checked = is_checked

    def check_memory(self, need: Need) -> None:
        """See `Engine.check_memory`."""
        if self.is_checked:
            super().check_memory(need)

    def _run(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Seconds]]:
        for item in items:
            with recording() as seconds:
                result = function(item)
            yield result, seconds


LOCAL = LocalEngine(is_checked=False)
"""The default of functions that are given none."""
