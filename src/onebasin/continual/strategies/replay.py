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
