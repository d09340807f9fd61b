"""Experience replay: every batch of the task comes with one of the memory."""

from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.strategies.base import Loss, Strategy, Training, Weighting


class Replay(Strategy):
    """Experience replay (Chaudhry et al. 2019, arXiv 1902.10486): C(theta; B_i) and C(theta; B_M) in one step.

    Args:
        model: where to start.
        loss: ``loss(output, target)``.
        weighting: "pooled" takes the mean over both batches, "equal" the average of the two means.
        training: see `Training`.
    """

    replays = True

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


def check_weighting(weighting: Any) -> None:
    """Refuse what is neither of the two."""
    if weighting not in ("pooled", "equal"):
        raise ValueError(f"weighting must be 'pooled' or 'equal', got {weighting!r}")
