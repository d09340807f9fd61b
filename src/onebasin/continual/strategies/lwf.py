"""LwF: on new data, keep the outputs of the last network."""

import copy
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Samples, as_input
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, Training


class LwF(Strategy):
    """Learning without forgetting (Li and Hoiem 2016, arXiv 1606.09282), its eqs. 2 to 4.

    C(theta; B_i) - strength sum_k sum_c y'_kc log yhat'_kc: the outputs of the last network on the batch are targets for
    every earlier head k, softened by a temperature. Tasks that share one head count as one.

    Args:
        model: Where to start.
        loss: ``loss(output, target)``.
        strength: lambda_o of the source.
        temperature: T of the source, which uses 2.
        training: See `Training`.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.LwF(model, strength=1.0, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        strength: float = 1.0,
        temperature: float = 2.0,
        **training: Unpack[Training],
    ):
        super().__init__(model, loss, **training)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.strength, self.temperature = strength, temperature
        self._teacher: nn.Module | None = None
        self._old_heads = torch.zeros(0, dtype=torch.int64)

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """The step of the base class, with a copy of the last network as the teacher."""
        old = self.heads[:-1]
        distinct = [old.index(classes) for classes in dict.fromkeys(old)]
        self._old_heads = torch.tensor(distinct, dtype=torch.int64, device=self.device)
        self._teacher = copy.deepcopy(self.model).eval() if old else None
        return super().make_step(samples, num_steps)

    def cost(self) -> Tensor:
        """The loss on a batch of the task, and the cross-entropy to the teacher's outputs on it."""
        batch = self.feeds[0].draw()
        inputs = as_input(batch.inputs)
        output = self.model(inputs)
        cost = self.loss(self.mask_heads(output, batch.heads), batch.targets)
        if self._teacher is None:
            return cost
        with torch.no_grad():
            before = self._soften(self._teacher(inputs)).exp()
        return cost - self.strength * self.members * (before * self._soften(output)).sum((0, 2)).mean()

    def _soften(self, output: Tensor) -> Tensor:
        """Log-probabilities of every earlier head, at the temperature: (heads, batch, classes)."""
        heads = self._old_heads.unsqueeze(1)
        softened = (output / self.temperature).expand(len(heads), -1, -1)
        return functional.log_softmax(self.mask_heads(softened, heads), dim=-1)

    def after_task(self, samples: Samples) -> None:
        """Release the teacher."""
        self._teacher = None
