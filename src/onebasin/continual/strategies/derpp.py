"""DER++: replay that also stores the outputs of the network."""

from typing import Unpack

from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, Training


class DERPlusPlus(Strategy):
    """Dark experience replay (Buzzega et al. 2020, arXiv 2004.07211), its eq. 6.

    C(theta; B_i) + alpha mean |z' - h(x')|^2 + beta C(theta; x'', y''), where z' is the output that the network had when
    its task was done, and x' and x'' are two batches of the memory. The authors fill a reservoir while they train; here the
    memory is that of all strategies, filled after each task.

    Args:
        model: Where to start.
        loss: ``loss(output, target)``.
        alpha: Weight of the distance to the stored outputs.
        beta: Weight of the loss on the memory.
        training: See `Training`.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.DERPlusPlus(model, alpha=0.1, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory = stores_outputs = True

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
        if losses.memory is None or losses.outputs is None:
            return losses.task
        return losses.task + self.beta * losses.memory + self.alpha * losses.outputs
