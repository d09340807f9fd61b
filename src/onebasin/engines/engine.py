"""The interface of an engine, and the one that works in this process."""

from __future__ import annotations

import collections
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch

from onebasin.engines.clock import Span, recording, spent_on
from onebasin.engines.journal import Check, Journal, Values
from onebasin.engines.memory_limits import MemoryEstimate, available_memory, check_device, check_host
from onebasin.engines.reduction_tree import Tree
from onebasin.engines.timeline import Timeline
from onebasin.engines.work_meter import WorkMeter
from onebasin.tensors.states import State

Item = TypeVar("Item")
Result = TypeVar("Result")
Handle = Any
"""A task that was given out, by which its answer can be asked for; or an `Answer` itself."""
DRIVER = "this process"
"""The row of the process that gives out work, in a timeline."""


class Answer(NamedTuple):
    """What a task returned.

    Attributes:
        result: of its function.
        spent: where the time went, by the names of workers.
    """

    result: Any
    spent: Sequence[tuple[str, Sequence[Span]]]


class Engine(ABC):
    """Maps functions over items, and combines results.

    Functions are known by their names, or are ``functools.partial`` of such; they and the items are sent to workers.

    Attributes:
        name: by which `make_engine` knows it.
        is_remote: whether workers are other processes, which read files themselves.
        workers: how many work at a time.
        memory: bytes that all processes on this machine may hold together; what is free if None.
        journal: where results are kept for a run that goes on after it was killed, if anywhere.
        timeline: where the time of all workers went.
        meter: how far all work has come.
        notes: what the work needs.
        tell: called with each note at once.
    """

    name: ClassVar[str]
    is_remote: ClassVar[bool] = True

    def __init__(self, workers: int = 1, memory: int | None = None):
        if workers < 1:
            raise ValueError(f"workers must be a whole number of at least 1, got {workers}")
        self.workers, self.memory = workers, memory
        self.journal: Journal | None = None
        self.timeline, self.meter = Timeline(), WorkMeter()
        self.notes: list[str] = []
        self.tell: Callable[[str], None] = lambda note: None

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went, summed over workers, by what it was spent on."""
        return self.timeline.seconds

    @property
    def most_under_way(self) -> int:
        """Items that are given out before their results are used: what is not asked for is not begun."""
        return 2 * self.workers

    @abstractmethod
    def _submit(self, function: Callable[[Any], Any], item: Any) -> Handle:
        """Give out a task."""

    @abstractmethod
    def _wait(self, handle: Handle) -> None:
        """Return when a task is done."""

    @abstractmethod
    def _fetch(self, handle: Handle) -> Answer:
        """The answer to a task that is done; raises what the task raised."""

    def _combine(self, combine: Callable[[Any, Any], Any], first: Handle, other: Handle) -> Handle:
        """A task whose answer is that of two others, combined."""
        with recording() as spans, spent_on("reduce"):
            result = combine(self._take(first), self._take(other))
        return Answer(result, [(DRIVER, spans)])

    def _cancel(self, handle: Handle) -> None:
        """Nobody wants the answer any more."""
        return

    def _run(
        self, function: Callable[[Any], Any], items: Iterable[Any], stage: str, size: Callable[[Any], float] | None
    ) -> Iterator[Handle]:
        """Tasks in the order of the items, each when it is done; few are under way at a time."""
        pending: collections.deque[tuple[Handle, float]] = collections.deque()
        left = iter(items)
        try:
            while True:
                while len(pending) < self.most_under_way and (item := next(left, pending)) is not pending:
                    amount = size(item) if stage and size is not None and self.meter.report is not None else 0.0
                    pending.append((self._submit(function, item), amount))
                if not pending:
                    return
                with spent_on("wait"):
                    self._wait(pending[0][0])
                handle, amount = pending.popleft()
                if amount:
                    self.meter.advance(stage, amount)
                yield handle
        finally:
            for handle, _ in pending:
                self._cancel(handle)

    def _take(self, handle: Handle) -> Any:
        answer = handle if isinstance(handle, Answer) else self._fetch(handle)
        for worker, spans in answer.spent:
            self.record(worker, spans)
        return answer.result

    def map(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        stage: str = "",
        size: Callable[[Item], float] | None = None,
    ) -> Iterator[Result]:
        """Yield ``function(item)`` for each item, in order.

        Items are taken while results are used: a generator of items may look at earlier results, but not rely on them.

        Args:
            function: of one item.
            items: to work on.
            stage: what progress calls the work; it is not reported if empty.
            size: how much work an item is, in bytes.
        """
        for handle in self._run(function, items, stage, size):
            yield self._take(handle)

    def reduce(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        combine: Callable[[Result, Result], Result],
        stage: str = "",
        size: Callable[[Item], float] | None = None,
    ) -> Result:
        """Combine ``function(item)`` of all items in a `Tree`; the other arguments are those of `map`."""
        tree = Tree(functools.partial(self._combine, combine))
        for handle in self._run(function, items, stage, size):
            tree.add(handle)
        whole = tree.finish()
        with spent_on("wait"):
            return self._take(whole)

    def map_checkpointed(
        self,
        function: Callable[[Item], Values],
        items: Sequence[Item],
        check: Callable[[Item, Values], None],
        stage: str = "",
        size: Callable[[Item], float] | None = None,
    ) -> Iterator[Values]:
        """`map` with results that are kept in the journal, and taken from it if they are there.

        Args:
            function: of one item.
            items: to work on.
            check: raises a ValueError if values from the journal are not what the function returns.
            stage: see `map`.
            size: see `map`.
        """
        if self.journal is None:
            yield from self.map(function, items, stage, size)
            return
        numbers = [self.journal.next() for _ in items]
        recalled = [
            self.journal.recall(number, functools.partial(check, item)) for number, item in zip(numbers, items, strict=True)
        ]
        missing = [item for item, known in zip(items, recalled, strict=True) if known is None]
        found = self.map(function, missing, stage, size)
        for number, item, known in zip(numbers, items, recalled, strict=True):
            if known is None:
                known = next(found)
                self.journal.keep(number, known)
            elif stage and size is not None and self.meter.report is not None:
                self.meter.advance(stage, size(item))
            yield known

    def checkpointed(self, compute: Callable[[], Values], check: Check) -> Values:
        """What `compute` returns, kept in the journal, or taken from it if `check` does not raise a ValueError."""
        if self.journal is None:
            return compute()
        number = self.journal.next()
        known = self.journal.recall(number, check)
        if known is None:
            known = compute()
            self.journal.keep(number, known)
        return known

    @contextlib.contextmanager
    def broadcast(self, *values: Any) -> Iterator[None]:
        """Inside, these values are sent to each worker once, wherever they occur in functions and items."""
        yield

    def check_states(self, states: Mapping[str, State]) -> None:
        """Refuse states that workers cannot read, by what messages call them.

        Raises:
            ValueError: saying why, and what to do.
        """
        return

    @property
    def workers_here(self) -> int:
        """How many of the workers are on this machine."""
        return self.workers

    @property
    def workers_on_gpu(self) -> int:
        """How many workers share one GPU."""
        return -(-self.workers // max(1, torch.cuda.device_count()))

    def check_memory(self, need: MemoryEstimate) -> None:
        """Refuse work that does not fit into memory: that of this machine, and that of a GPU.

        Raises:
            ValueError: with what it needs, and what there is.
        """
        check_host(need, self.workers_here, self.is_remote, self.memory)
        if need.device and torch.cuda.is_available():
            check_device(need, self.workers_on_gpu, available_memory(torch.device("cuda")) or 0)
        self.add_note(need.describe(self.workers, self.is_remote))

    def add_note(self, note: str) -> None:
        """Tell a remark, once."""
        if note not in self.notes:
            self.notes.append(note)
            self.tell(note)

    def record(self, worker: str, spans: Sequence[Span]) -> None:
        """Count time that a worker has spent."""
        self.timeline.add(worker, spans)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this process does inside, beside its workers: not the time it waits for them."""
        with recording() as spans:
            yield
        self.record(DRIVER, [span for span in spans if span.what != "other"])

    def close(self) -> None:
        """End the workers."""
        return

    def __reduce__(self) -> Any:
        return _get_local, ()  # what a task does inside is done by its worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalEngine(Engine):
    """Works in this process, one item after another, with PyTorch's threads.

    Args:
        memory: bytes that this process may hold; what is free if None.
        is_checked: whether work that does not fit into memory is refused, and its time recorded.
    """

    name = "local"
    is_remote = False

    def __init__(self, memory: int | None = None, is_checked: bool = True):
        super().__init__(1, memory)
        self.is_checked = is_checked

    @property
    def most_under_way(self) -> int:
        """See `Engine.most_under_way`: an item is done when it is given out."""
        return 1

    def check_memory(self, need: MemoryEstimate) -> None:
        """See `Engine.check_memory`."""
        if self.is_checked:
            super().check_memory(need)

    def record(self, worker: str, spans: Sequence[Span]) -> None:
        """See `Engine.record`."""
        if self.is_checked:
            super().record(worker, spans)

    def _submit(self, function: Callable[[Any], Any], item: Any) -> Answer:
        with recording() as spans:
            result = function(item)
        return Answer(result, [(DRIVER, spans)])

    def _wait(self, handle: Answer) -> None:
        return

    def _fetch(self, handle: Answer) -> Answer:
        return handle


LOCAL = LocalEngine(is_checked=False)
"""The default of functions that are given none."""


def _get_local() -> Engine:
    return LOCAL
