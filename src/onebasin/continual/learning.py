"""A strategy on a stream: learn, examine, go on."""

from collections.abc import Callable, Iterator

from torch import Tensor

from onebasin.continual.metrics import AccuracyMatrix
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.streams import Stream


def run_stream(
    strategy: Strategy,
    stream: Stream,
    after: Callable[[AccuracyMatrix], None] | None = None,
    start: AccuracyMatrix | None = None,
) -> AccuracyMatrix:
    """Learn the tasks of a stream one after the other; after each, examine all tasks so far.

    Args:
        strategy: a new one, or one that has learnt the first tasks of this stream; of one network, not of several members.
        stream: what to learn and what to be examined on.
        after: called after each task with the matrix so far: to look at it, or to save it and the strategy.
        start: the matrix of the tasks that the strategy has learnt before.
    """
    if strategy.members > 1:
        raise ValueError(f"the strategy trains {strategy.members} networks, each with a matrix of its own: use learn_stream")
    rows = [] if start is None else [list(row) for row in start.rows]
    if len(rows) != strategy.num_tasks:
        raise ValueError(
            f"the strategy has learnt {strategy.num_tasks} tasks: give start=, their accuracy matrix (got {len(rows)} rows)"
        )
    for row in learn_stream(strategy, stream):
        if row is not None:
            rows.append(row.tolist())
            if after is not None:
                after(AccuracyMatrix(list(rows)))
    return AccuracyMatrix(rows)


def learn_stream(strategy: Strategy, stream: Stream) -> Iterator[Tensor | None]:
    """`run_stream` in portions, which never waits for the device, for `interleave`.

    Yields:
        After each task the accuracies on all tasks so far; None within a task.
    """
    for number in range(strategy.num_tasks, len(stream)):
        for _ in strategy.learn(stream.train[number]):
            yield None
        yield strategy.accuracies(stream.test[: number + 1])
