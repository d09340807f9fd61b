"""Stable SGD: end in wide minima, by dropout, small batches and a large rate that falls from task to task."""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Samples
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, MakeOptimizer, Training, sgd
from onebasin.tensors.seeding import seeded

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class StableSGD(Strategy):
    """Stable SGD (Mirzadeh et al. 2020, arXiv 2006.06958): how one trains decides how much is forgotten.

    C(theta; B_t) by SGD with momentum, small batches B_t, dropout, and in task t = 0, 1, ... the rate

        max(lr gamma^t, min_lr)

    There is no memory. A large rate and small batches end in wide minima; small later rates stay near them.

    Args:
        model: Where to start. Give it dropout layers.
        loss: ``loss(output, target)``.
        gamma: The factor of the rate from task to task.
        min_lr: The smallest rate.
        dropout: The probability of every ``nn.Dropout`` layer of the model; they stay as they are if None.
        training: See `Training`. Here `optimizer` is SGD with a rate lr of 0.1 and momentum 0.8, `batch_size` is 64 and
            `epochs` is 1. Dropout follows `seed`, but with `capture` it follows PyTorch's generator of the device.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.StableSGD(model, gamma=0.55, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        gamma: float = 0.55,
        min_lr: float = 5e-5,
        dropout: float | None = None,
        **training: Unpack[Training],
    ):
        defaults: Training = {"optimizer": sgd(0.1, momentum=0.8), "batch_size": 64, "epochs": 1}
        options: Training = {**defaults, **training}
        super().__init__(model, loss, **options)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be positive and at most 1, got {gamma}")
        if min_lr < 0:
            raise ValueError(f"min_lr must not be negative, got {min_lr}")
        self.gamma, self.min_lr = gamma, min_lr
        layers = [module for module in self.model.modules() if isinstance(module, _DROPOUTS)]
        if dropout is not None:
            if not 0 <= dropout < 1:
                raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
            if not layers:
                raise ValueError("dropout sets the probability of nn.Dropout layers, and the model has none")
            for layer in layers:
                layer.p = dropout

    def cost(self) -> Tensor:
        """The loss on a batch of the task."""
        return self.task_loss()

    def make_optimizer(self, make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser with the rate of the task."""
        optimizer = super().make_optimizer(make, parameters)
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"] * self.gamma ** (self.num_tasks - 1), self.min_lr)
        return optimizer

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """The step of the base class, whose dropout follows the seed."""
        step = super().make_step(samples, num_steps)
        if self.capture:  # a graph cannot contain the seeding of a generator
            return step
        seeds = iter(torch.randint(2**62, (num_steps,), generator=self.generator).tolist())

        def seeded_step() -> None:
            with seeded(next(seeds), self.device):
                step()

        return seeded_step
