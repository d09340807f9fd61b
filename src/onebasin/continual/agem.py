"""A-GEM: a step may not raise the loss on the memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onebasin.continual.samples import Feed, Samples
from onebasin.continual.strategy import Strategy


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
            for parameter, gradient in zip(parameters, project(task, memory), strict=True):
                parameter.grad = gradient
            optimizer.step()

        return step

    def _gradient(self, feed: Feed) -> tuple[Tensor, ...]:
        batch = feed.draw()
        cost = self.loss(self.answer(batch), batch.targets)
        return torch.autograd.grad(cost, list(self.model.parameters()), materialize_grads=True)


def project(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    """The gradient without what it has against the reference; the gradient itself where they agree.

    Without a branch, so that a captured step takes either way.
    """
    inner = torch.stack([(g * r).sum() for g, r in zip(gradient, reference, strict=True)]).sum()
    square = torch.stack([r.square().sum() for r in reference]).sum()
    against = inner.clamp(max=0) / square.clamp(min=torch.finfo(square.dtype).tiny)
    return [g - against * r for g, r in zip(gradient, reference, strict=True)]
