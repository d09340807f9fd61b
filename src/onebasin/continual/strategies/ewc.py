"""EWC: a quadratic penalty keeps parameters that mattered to earlier tasks near their old values."""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Samples, as_input
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, Training

_CHUNK = 32


class EWC(Strategy):
    """Elastic weight consolidation (Kirkpatrick et al. 2017, arXiv 1612.00796), its eq. 3, with a term for each task.

    C(theta; B_i) + strength / 2 sum_k sum_j F_kj (theta_j - theta_kj)^2. F_k is the diagonal of the Fisher information at
    the end of task k, from the gradients of single examples with their own labels. The sum of the quadratics is stored as
    one quadratic around the average of the theta_k weighted by F_k, which is equal up to a constant.

    Args:
        model: Where to start.
        loss: ``loss(output, target)``, a mean over the batch.
        strength: lambda. Avalanche leaves out the half: its lambda is half of this one.
        num_fisher: Examples on which F is estimated; all if None.
        fisher_batch: Gradients are averaged over this many examples before they are squared. One is the definition;
            libraries often square the gradients of training batches, which makes F smaller by about that factor.
        training: See `Training`.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.EWC(model, strength=10.0, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        strength: float = 10.0,
        num_fisher: int | None = 1000,
        fisher_batch: int = 1,
        **training: Unpack[Training],
    ):
        super().__init__(model, loss, **training)
        for name, value in (("num_fisher", num_fisher), ("fisher_batch", fisher_batch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.strength, self.num_fisher, self.fisher_batch = strength, num_fisher, fisher_batch
        self._fisher: list[Tensor] = []
        self._anchor: list[Tensor] = []

    def cost(self) -> Tensor:
        """The loss on a batch of the task, and the penalty."""
        terms = [
            (fisher * (parameter - anchor).square()).sum()
            for parameter, fisher, anchor in zip(self.model.parameters(), self._fisher, self._anchor, strict=False)
        ]
        loss = self.task_loss()
        return loss + self.strength / 2 * torch.stack(terms).sum() if terms else loss

    def after_task(self, samples: Samples) -> None:
        """Estimate F, and add the quadratic of this task to the sum."""
        parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        fisher = self._estimate(samples)
        if not self._fisher:
            self._fisher, self._anchor = fisher, parameters
            return
        for total, anchor, new, parameter in zip(self._fisher, self._anchor, fisher, parameters, strict=True):
            total += new
            anchor += torch.where(total > 0, new / total, 1.0) * (parameter - anchor)

    def _estimate(self, samples: Samples) -> list[Tensor]:
        """The mean of the squared gradients of examples, or of small batches of them."""
        params = {name: value.detach() for name, value in self.model.named_parameters()}
        count = len(samples) if self.num_fisher is None else min(self.num_fisher, len(samples))
        size = min(self.fisher_batch, count)
        order = torch.randperm(len(samples), generator=self.generator)[: count // size * size].view(-1, size)
        order = order.repeat_interleave(self.members, dim=1)  # each network gets every example

        def cost(params: dict[str, Tensor], inputs: Tensor, targets: Tensor, heads: Tensor) -> Tensor:
            return self.loss(self.forward(Samples(inputs, targets, heads), params), targets)

        gradient = torch.func.vmap(torch.func.grad(cost), in_dims=(None, 0, 0, 0))
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        for index in order.to(self.device).split(_CHUNK):
            part = samples.at(index)
            for name, value in gradient(params, as_input(part.inputs), part.targets, part.heads).items():
                total[name] += value.square().sum(0)
        return [value / len(order) for value in total.values()]

    def state_dict(self) -> dict[str, Any]:
        """The state, with the penalty."""
        penalty = {"fisher": self._fisher, "anchor": self._anchor}
        return {**super().state_dict(), **{name: [value.clone() for value in values] for name, values in penalty.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, with its penalty."""
        super().load_state_dict(state)
        self._fisher = [value.to(self.device).clone() for value in state["fisher"]]
        self._anchor = [value.to(self.device).clone() for value in state["anchor"]]
