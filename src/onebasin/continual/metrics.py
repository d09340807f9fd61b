"""The accuracy on a task, and the matrix of accuracies after each task of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onebasin.continual.samples import as_input
from onebasin.continual.streams import Task
from onebasin.plots import plot_accuracies

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def accuracy(model: nn.Module, task: Task, members: int = 1, batch_size: int = 5000) -> Tensor:
    """The share of correct answers in eval mode, among the classes of the task if it has any; on the device of the task.

    Args:
        model: Left unchanged.
        task: Inputs and labels.
        members: The number of networks in the model, see `Training`; the result then is (members,).
        batch_size: Examples per batch.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> 0 <= float(continual.accuracy(model, stream.test[0])) <= 1
    True
    """
    correct = torch.zeros(members, device=task.inputs.device)
    allowed = None if task.classes is None else torch.tensor(task.classes, device=task.inputs.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        for inputs, targets in zip(task.inputs.split(batch_size), task.targets.split(batch_size), strict=True):
            output = model(as_input(inputs.repeat_interleave(members, dim=0) if members > 1 else inputs))
            chosen = output.argmax(1) if allowed is None else allowed[output[:, allowed].argmax(1)]
            correct += (chosen.view(-1, members) == targets.unsqueeze(1)).sum(0)
    for module, mode in modes.items():
        module.training = mode
    return (correct if members > 1 else correct.squeeze(0)) / len(task)


@dataclass(frozen=True)
class AccuracyMatrix:
    """Row t has the accuracies on tasks 0 ... t after task t was learned; further entries of a row are not used.

    Attributes:
        rows: a[t][i], from 0 to 1.

    >>> from onebasin.continual import AccuracyMatrix
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
        """Tasks learned so far."""
        return len(self.rows)

    @property
    def average(self) -> float:
        """Mean accuracy of the last network over all tasks."""
        last = self.rows[-1][: self.num_tasks]
        return sum(last) / len(last)

    @property
    def learning(self) -> float:
        """Mean accuracy on each task right after it was learned."""
        return sum(row[t] for t, row in enumerate(self.rows)) / self.num_tasks

    @property
    def forgetting(self) -> float:
        """The paper's: the mean fall of earlier tasks from their best, 1/(T-1) sum_{i<T} max_{i<=t<T} (a_ti - a_Ti)."""
        return self._mean_over_earlier(
            lambda i: max(self.rows[t][i] for t in range(i, self.num_tasks - 1)) - self.rows[-1][i]
        )

    @property
    def drop(self) -> float:
        """Avalanche's forgetting: the mean fall of earlier tasks since they were new, 1/(T-1) sum_{i<T} (a_ii - a_Ti)."""
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
        return plot_accuracies(self.rows, ax)

    def __str__(self) -> str:
        return (
            f"accuracy {self.average:.2%}, forgetting {self.forgetting:.3f} (since learned {self.drop:.3f}) "
            f"over {self.num_tasks} tasks"
        )
