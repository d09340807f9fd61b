"""Finetuning: each task alone, from the network that the last one left. The lower bound."""

from torch import Tensor

from onebasin.continual.strategies.base import Strategy


class Finetune(Strategy):
    """Minimise the loss on the current task, C(theta; T_i). Nothing is done against forgetting.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.Finetune(model, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def cost(self) -> Tensor:
        """The loss on a batch of the task."""
        return self.task_loss()
