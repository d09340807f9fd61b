"""CLeWI: after each task, interpolate between the new network and the aligned old one."""

import copy
from collections.abc import Callable
from typing import Unpack

import torch
from torch import nn
from torch.nn import functional

from onebasin.continual.samples import Samples
from onebasin.continual.strategies.replay import Replay
from onebasin.continual.training import Loss, Training, Weighting
from onebasin.matching.alignment import align
from onebasin.matching.methods import ActivationMatching
from onebasin.symmetries import Symmetry


class CLeWI(Replay):
    """Continual learning with weight interpolation (Kozal et al. 2024, arXiv 2404.04002), on top of experience replay.

    Task t is learned with replay, from theta_{t-1} to theta_new. The permutation pi then pairs the units of theta_{t-1} with
    those of theta_new whose activations correlate most, and

        theta_t = (1 - alpha) theta_new + alpha pi(theta_{t-1}).

    Activations, and then the statistics of batch norms, are taken on batches of memory and task in which all tasks so far
    have the same share. (The authors take them on their memory, which has examples of the new task already.)

    Args:
        model: Where to start.
        symmetry: Of the model, from `onebasin.symmetry`.
        loss: ``loss(output, target)``.
        alpha: Weight of the old network.
        weighting: See `Replay`.
        training: See `Training`. Here `reset_norms` is on, because no step has seen the interpolated network, and
            `members` must be 1.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> import onebasin as ob
    >>> symmetry = ob.symmetry(model, stream.train[0].inputs[:2])
    >>> strategy = continual.CLeWI(model, symmetry, alpha=0.3, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        symmetry: Symmetry,
        loss: Loss = functional.cross_entropy,
        alpha: float = 0.3,
        weighting: Weighting = "pooled",
        **training: Unpack[Training],
    ):
        options: Training = {"reset_norms": True, **training}
        super().__init__(model, loss, weighting, **options)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
        if self.members > 1:
            raise ValueError(f"CLeWI trains one network, got members={self.members}: make a strategy for each")
        if not self.memory.per_class:
            raise ValueError("activations are compared on the memory: memory_per_class must be at least 1")
        self.symmetry, self.alpha = symmetry.bind(model), alpha
        if symmetry.groups and not any(symmetry.sites.values()):
            raise ValueError(
                "the symmetry does not say where activations are: make it with onebasin.symmetry(model, inputs)"
            )
        self._old: nn.Module | None = None

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """The step of replay; the old network is kept until the task is done."""
        self._old = copy.deepcopy(self.model).eval() if self.num_tasks > 1 else None
        return super().make_step(samples, num_steps)

    def after_task(self, samples: Samples) -> None:
        """Align the old network to the new one, and interpolate."""
        if self._old is None:
            return
        found = align(
            self._old, to=self.model, symmetry=self.symmetry, method=ActivationMatching(), data=self.mixed_batches(samples),
            detect_copy=False, polish=False,
        )  # fmt: skip
        aligned = dict(found.model.named_parameters())
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.lerp_(aligned[name], self.alpha)
        unmoved = found.permutation.agreement(self.symmetry.identity())
        self.history.append({"task": float(self.num_tasks - 1), "moved": 1 - unmoved})
        self._old = None
