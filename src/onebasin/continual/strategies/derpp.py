"""DER++: replay that also keeps what the network once answered."""

from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.strategies.base import Loss, Strategy, Training


class DERPlusPlus(Strategy):
    """Dark experience replay (Buzzega et al. 2020, arXiv 2004.07211), its eq. 6.

    C(theta; B_i) + alpha mean |z' - h(x')|^2 + beta C(theta; x'', y''), where z' is what the network answered when its
    task was done, and x' and x'' are two batches of the memory. The authors fill a reservoir while they train; here the
    memory is that of all strategies, filled after each task.

    Args:
        model: where to start.
        loss: ``loss(output, target)``.
        alpha: weight of the kept answers.
        beta: weight of the labels.
        training: see `Training`.
    """

    replays = recalls = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        alpha: float = 0.5,
        beta: float = 0.5,
        **training: Unpack[Training],
    ):
        super().__init__(model, loss, **training)
        self.alpha, self.beta = alpha, beta

    def cost(self) -> Tensor:
        """The three terms, from one pass of the network."""
        losses = self.losses()
        if losses.old is None or losses.kept is None:
            return losses.new
        return losses.new + self.beta * losses.old + self.alpha * losses.kept
