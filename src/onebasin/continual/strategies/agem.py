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
    """

    replays = True

    def begin(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """Two gradients a step."""
        if not len(self.memory):
            return super().begin(samples, num_steps)
        self.open_feeds(samples, num_steps)
        replay = self.replay
        assert replay is not None
        parameters = list(self.model.parameters())
        optimizer = self.make_optimizer(self.optimizer, parameters)

        def step() -> None:
            task, memory = (self._gradient(feed) for feed in (self.feed, replay))
            parts = project(task, memory).split([parameter.numel() // self.members for parameter in parameters], dim=1)
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.contiguous().view_as(parameter)
            optimizer.step()

        return step

    def _gradient(self, feed: Feed) -> Tensor:
        """One long vector a member: (members, parameters)."""
        batch = feed.draw()
        cost = self.loss(self.answer(batch), batch.targets)
        gradients = torch.autograd.grad(cost, list(self.model.parameters()), materialize_grads=True)
        return torch.cat([gradient.reshape(self.members, -1) for gradient in gradients], dim=1)


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """The gradient without what it has against the reference; the gradient itself where they agree.

    Along the last axis, and without a branch, so that a captured step takes either way.
    """
    square = torch.linalg.vecdot(reference, reference).clamp_(min=torch.finfo(reference.dtype).tiny)
    against = torch.linalg.vecdot(gradient, reference).clamp_(max=0) / square
    return torch.addcmul(gradient, reference, against.unsqueeze(-1), value=-1)
