"""What a stream of tasks did to a network: the accuracy matrix and what is read off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class AccuracyMatrix:
    """Row t holds the accuracies on tasks 0 ... t after task t was learnt; further entries are kept and not used.

    Attributes:
        rows: a[t][i], shares from 0 to 1.

    >>> matrix = AccuracyMatrix([[0.9], [0.95, 0.8], [0.7, 0.6, 0.9]])
    >>> f"{matrix.average:.3f} {matrix.forgetting:.3f} {matrix.drop:.3f} {matrix.backward_transfer:.3f}"
    '0.733 0.225 0.200 -0.200'
    """

    rows: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) <= t for t, row in enumerate(self.rows)):
            raise ValueError("row t of an accuracy matrix must hold the accuracies on tasks 0 ... t")

    @property
    def num_tasks(self) -> int:
        """Tasks learnt so far."""
        return len(self.rows)

    @property
    def average(self) -> float:
        """Mean accuracy of the last network over all tasks."""
        last = self.rows[-1][: self.num_tasks]
        return sum(last) / len(last)

    @property
    def learning(self) -> float:
        """Mean accuracy on each task right after it was learnt."""
        return sum(row[t] for t, row in enumerate(self.rows)) / self.num_tasks

    @property
    def forgetting(self) -> float:
        """The paper's: how far each earlier task fell from its best, 1/(T-1) sum_{i<T} max_{i<=t<T} (a_ti - a_Ti)."""
        return self._mean_over_earlier(
            lambda i: max(self.rows[t][i] for t in range(i, self.num_tasks - 1)) - self.rows[-1][i]
        )

    @property
    def drop(self) -> float:
        """Avalanche's forgetting: how far each earlier task fell since it was learnt, 1/(T-1) sum_{i<T} (a_ii - a_Ti)."""
        return self._mean_over_earlier(lambda i: self.rows[i][i] - self.rows[-1][i])

    @property
    def backward_transfer(self) -> float:
        """Lopez-Paz and Ranzato (2017), eq. 3: minus the drop, positive where later tasks help earlier ones."""
        return -self.drop

    def _mean_over_earlier(self, value: Callable[[int], float]) -> float:
        earlier = range(self.num_tasks - 1)
        return sum(value(i) for i in earlier) / len(earlier) if earlier else 0.0

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the accuracy on each task over time; see `onebasin.plots.plot_accuracies`."""
        from onebasin.plots import plot_accuracies

        return plot_accuracies(self.rows, ax)

    def __str__(self) -> str:
        return (
            f"accuracy {self.average:.2%}, forgetting {self.forgetting:.3f} (since learnt {self.drop:.3f}) "
            f"over {self.num_tasks} tasks"
        )
