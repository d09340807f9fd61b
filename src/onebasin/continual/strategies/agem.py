"""A-GEM: a step may not raise the loss on the memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from onebasin.continual.samples import Feed, Samples
from onebasin.continual.strategies.base import Strategy


class AGEM(Strategy):
    """Averaged gradient episodic memory (Chaudhry et al. 2018, arXiv 1812.00420), its eq. 11.

    Where the gradient g of the task and g_ref of a batch of the memory disagree, g^T g_ref < 0, the step is along
    g - (g^T g_ref / g_ref^T g_ref) g_ref instead.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.AGEM(model, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory = True

    def cost(self) -> Tensor:
        """The loss on a batch of the first task; there is no memory yet."""
        return self.task_loss()

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """A step along the projected gradient of the task; along the gradient itself while the memory is empty."""
        if not len(self.memory):
            return super().make_step(samples, num_steps)
        self.open_feeds(samples, num_steps)
        parameters = list(self.model.parameters())
        optimizer = self.make_optimizer(self.optimizer, parameters)

        def step() -> None:
            task, memory = (self._gradient(feed) for feed in self.feeds)
            parts = project(task, memory).split([parameter.numel() // self.members for parameter in parameters], dim=1)
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.contiguous().view_as(parameter)
            optimizer.step()

        return step

    def _gradient(self, feed: Feed) -> Tensor:
        """The gradient of all parameters as one vector per network, (members, parameters)."""
        batch = feed.draw()
        cost = self.loss(self.forward(batch), batch.targets)
        gradients = torch.autograd.grad(cost, list(self.model.parameters()), materialize_grads=True)
        return torch.cat([gradient.reshape(self.members, -1) for gradient in gradients], dim=1)


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """Remove from the gradient its component against the reference, along the last axis; no change where they agree.

    It has no branch, so that a captured step can take either way.
    """
    square = torch.linalg.vecdot(reference, reference).clamp_(min=torch.finfo(reference.dtype).tiny)
    against = torch.linalg.vecdot(gradient, reference).clamp_(max=0) / square
    return torch.addcmul(gradient, reference, against.unsqueeze(-1), value=-1)
