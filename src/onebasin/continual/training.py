"""How a strategy trains: the options that all strategies share, the optimisers, and how losses are weighed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Weighting = Literal["pooled", "equal"]


class Training(TypedDict, total=False):
    """How a task is trained on; options of every strategy.

    Attributes:
        optimizer: Makes an optimiser for a list of parameters, anew for each task; SGD with a rate of 0.1 if not given.
        batch_size: Examples of the task per step (100).
        epochs: Passes over a task (5).
        first_optimizer: For the first task, when there is nothing to forget yet; `optimizer` if not given.
        first_epochs: For the first task; `epochs` if not given.
        memory_per_class: Examples to store of each class of each task (5), for strategies that have a memory.
        replay_size: Examples of the memory per step; the smaller of `batch_size` and the memory if not given.
        reset_norms: Estimate batch-norm statistics anew after each task, on batches in which all tasks so far have the same
            share; needs a memory. Otherwise the statistics are those of the training batches.
        seed: Of batches and memory.
        members: The number of networks that the model consists of, stacked along the first axis of every parameter. They are
            trained together, in little more time than one. Example j of a batch is for network j % members, and the cost is
            the sum of their costs. Each has its own batches and its own memory.
        capture: Run steps as CUDA graphs. The optimiser must support capture, as SGD and the Adam family do.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> options = continual.Training(optimizer=continual.sgd(0.2, momentum=0.9), epochs=2, batch_size=50)
    >>> strategy = continual.Finetune(model, **options)
    """

    optimizer: MakeOptimizer
    batch_size: int
    epochs: int
    first_optimizer: MakeOptimizer | None
    first_epochs: int | None
    memory_per_class: int
    replay_size: int | None
    reset_norms: bool
    seed: int
    members: int
    capture: bool


class Losses(NamedTuple):
    """The parts of a cost that uses a memory.

    Attributes:
        task: The loss on a batch of the task.
        memory: The loss on a batch of the memory; None while it is empty.
        outputs: The mean squared distance of the outputs, on another batch of the memory, to those that were stored when the
            task of each example was done (Buzzega et al. 2020); None if outputs are not stored.
        task_share: The share of the task in both batches together.
    """

    task: Tensor
    memory: Tensor | None
    outputs: Tensor | None
    task_share: float

    def weigh(self, weighting: Weighting) -> Tensor:
        """Task and memory: "pooled" is the mean over both batches, "equal" the average of the two means."""
        if self.memory is None:
            return self.task
        return torch.lerp(self.memory, self.task, self.task_share if weighting == "pooled" else 0.5)


def check_weighting(weighting: Any) -> None:
    """Refuse what is neither of the two."""
    if weighting not in ("pooled", "equal"):
        raise ValueError(f"weighting must be 'pooled' or 'equal', got {weighting!r}")


def sgd(lr: float = 0.1, **options: Any) -> MakeOptimizer:
    """Plain stochastic gradient descent, as an argument of strategies.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> strategy = continual.Finetune(nn.Linear(2, 2), optimizer=continual.sgd(0.05, momentum=0.9))
    """
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **{**_fuse(parameters), **options})


def adam(lr: float = 1e-3, **options: Any) -> MakeOptimizer:
    """Adam, as an argument of strategies.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> strategy = continual.Finetune(nn.Linear(2, 2), optimizer=continual.adam(1e-3))
    """
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, **{**_fuse(parameters), **options})


def _fuse(parameters: list[nn.Parameter]) -> dict[str, bool]:
    """On a GPU, one kernel for all parameters: the time of a small network is proportional to its number of kernels."""
    return {"fused": True} if all(parameter.is_cuda for parameter in parameters) else {}
