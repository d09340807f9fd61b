"""Experience replay: every batch of the task comes with one of the memory."""

from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, Training, Weighting, check_weighting


class Replay(Strategy):
    """Experience replay (Chaudhry et al. 2019, arXiv 1902.10486): C(theta; B_i) and C(theta; B_M) in one step.

    Args:
        model: Where to start.
        loss: ``loss(output, target)``.
        weighting: "pooled" takes the mean over both batches, "equal" the average of the two means.
        training: See `Training`.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.Replay(model, epochs=3, batch_size=20, memory_per_class=5)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        weighting: Weighting = "pooled",
        **training: Unpack[Training],
    ):
        super().__init__(model, loss, **training)
        check_weighting(weighting)
        self.weighting: Weighting = weighting

    def cost(self) -> Tensor:
        """The loss on both batches."""
        return self.losses().weigh(self.weighting)
