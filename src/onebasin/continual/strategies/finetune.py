"""Finetuning: each task alone, from the network that the last one left. The lower bound."""

from torch import Tensor

from onebasin.continual.strategies.base import Strategy


class Finetune(Strategy):
    """Minimise the loss on the current task, C(theta; T_i). Nothing is done against forgetting."""

    def cost(self) -> Tensor:
        """The loss on a batch of the task."""
        return self.task_loss()
