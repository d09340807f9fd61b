"""Learning a stream of tasks with a strategy, and several streams at the same time on one device."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from onebasin.continual.metrics import AccuracyMatrix
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.streams import Stream

_DONE = object()


def run_stream(
    strategy: Strategy,
    stream: Stream,
    after: Callable[[AccuracyMatrix], None] | None = None,
    start: AccuracyMatrix | None = None,
) -> AccuracyMatrix:
    """Learn the tasks of a stream one after the other; after each, evaluate the network on all tasks so far.

    Args:
        strategy: A new one, or one that has learned the first tasks of this stream; with ``members=1``.
        stream: The tasks to learn, and their test data.
        after: Called after each task with the matrix so far, to look at it, or to save it and the strategy.
        start: The matrix of the tasks that the strategy has learned before.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> matrix = continual.run_stream(continual.Replay(model, epochs=1), stream)
    >>> [len(row) for row in matrix.rows]
    [1, 2, 3, 4, 5]
    """
    if strategy.members > 1:
        raise ValueError(f"the strategy trains {strategy.members} networks, each with a matrix of its own: use learn_stream")
    rows = [] if start is None else [list(row) for row in start.rows]
    if len(rows) != strategy.num_tasks:
        raise ValueError(
            f"the strategy has learned {strategy.num_tasks} tasks: give start=, their accuracy matrix (got {len(rows)} rows)"
        )
    for row in learn_stream(strategy, stream):
        if row is not None:
            rows.append(row.tolist())
            if after is not None:
                after(AccuracyMatrix(list(rows)))
    return AccuracyMatrix(rows)


def learn_stream(strategy: Strategy, stream: Stream) -> Iterator[Tensor | None]:
    """`run_stream` in portions, for `interleave`. It never waits for the device.

    Yields:
        After each task the accuracies on all tasks so far; None within a task.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> steps = continual.learn_stream(continual.Finetune(model, epochs=1), stream)
    >>> [len(accuracies) for accuracies in steps if accuracies is not None]
    [1, 2, 3, 4, 5]
    """
    for number in range(strategy.num_tasks, len(stream)):
        for _ in strategy.learn(stream.train[number]):
            yield None
        yield strategy.accuracies(stream.test[: number + 1])


def interleave(runs: Sequence[Iterator[object]], device: torch.device | str) -> None:
    """Advance several runs in turn until all are done. On CUDA each has its own stream, so that they share the device.

    Small networks leave most of a GPU idle: five seeds at the same time take little longer than one. What the runs share
    must be made before. The caller's stream waits for all of them, so that their results can be read afterwards.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategies = [continual.Finetune(model, epochs=1, seed=seed) for seed in range(2)]
    >>> continual.interleave([continual.learn_stream(strategy, stream) for strategy in strategies], "cpu")
    >>> [strategy.num_tasks for strategy in strategies]
    [5, 5]
    """
    streams = [torch.cuda.Stream() for _ in runs] if torch.device(device).type == "cuda" else []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    pending = list(zip(runs, streams or [None] * len(runs), strict=True))
    while pending:
        left = []
        for run, stream in pending:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                if next(run, _DONE) is not _DONE:
                    left.append((run, stream))
        pending = left
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
