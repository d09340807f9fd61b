"""Incremental learning by re-basin: the paper's strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Feed, Samples
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.strategies.soft_midpoint import SoftMidpoint
from onebasin.continual.training import Loss, MakeOptimizer, Training, Weighting, adam, check_weighting, sgd
from onebasin.landscape.batch_norm import using_batch_statistics
from onebasin.operator import sinkhorn
from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Permutation, Symmetry, Transform

Fusion = Literal["code", "paper"]
_NUM_HARDENING_SAMPLES = 500


class RebasinStrategy(Strategy):
    """Algorithm 1 of the paper: move along the line between a network and a permutation of it, and a little off that line.

    For each task but the first, it minimises over plans P and a residual delta together, on the task and the memory,

        C((theta + pi_P(theta)) / 2 + delta) + beta |delta|^2    (eq. 10)

    Then it hardens the plans and fuses the two networks (eq. 12). The first task is trained as usual. The
    weight decay of `optimizer` is beta.

    Args:
        model: Where to start.
        symmetry: Of the model, from `onebasin.symmetry`. The scales and bases of one that was traced with
            ``kinds="positive"`` or ``"all"`` are learned beside the plans, and are part of pi. The paper has permutations.
        loss: ``loss(output, target)``.
        alpha: Weight of theta in the fusion.
        fusion: "code": theta' = alpha theta + (1 - alpha) pi(theta) + delta, as in the authors' code; "paper": alpha and
            1 - alpha exchanged, as in their text.
        weighting: "pooled" takes the mean over the batches of task and memory, "equal" the average of the two means.
        recall: Weight of the distance to the outputs that the network had on the memory when each task was done, as in
            `DERPlusPlus`. The paper does not have this term. With 0, outputs are not stored.
        groups: Which groups to permute, as shell patterns; all if None, none (residual alone) if empty.
        residual: Whether there is a delta.
        share_after_fusion: Share of the steps that come after the fusion and train delta on the fused network. The paper has
            none: it minimises the cost of the soft midpoint, which is not the network that it keeps.
        plan_optimizer: For the logits of the plans; Adam with a rate of 0.1 if not given.
        scale_optimizer: For scales and bases; Adam with a rate of 0.003 if not given. At the rate of the plans the network
            is lost within a few tasks.
        scale_limit: After each step the logarithms of a scale are centred, and clamped to this bound.
        clip: Bound on each entry of the gradient of C in delta; None for no bound. With weight decay beta, no entry of delta
            grows beyond clip / beta.
        noise: Standard deviation of the noise on the identity that the logits start from.
        mass: Start from an identity whose plan has this mass on the diagonal, for any size, instead of the paper's.
        tau: Temperature of the Sinkhorn operator.
        num_iters: Its rounds.
        solver_steps: The largest number of solver steps in its gradient. Sharp plans need dozens to reach rounding; the
            gradient of a random batch does not need that.
        training: See `Training`. Here `optimizer` is for delta, and by default SGD with a rate of 0.05 and weight decay 0.1;
            `first_optimizer` is Adam with a rate of 1e-3; and `reset_norms` is on, because no step has seen the fused
            network.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> import onebasin as ob
    >>> symmetry = ob.symmetry(model, stream.train[0].inputs[:2])
    >>> strategy = continual.RebasinStrategy(model, symmetry, epochs=3, batch_size=20, clip=0.1)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory = True

    def __init__(
        self,
        model: nn.Module,
        symmetry: Symmetry,
        loss: Loss = functional.cross_entropy,
        alpha: float = 0.8,
        fusion: Fusion = "code",
        weighting: Weighting = "pooled",
        recall: float = 0.0,
        groups: Iterable[str] | None = None,
        residual: bool = True,
        share_after_fusion: float = 0.0,
        plan_optimizer: MakeOptimizer | None = None,
        scale_optimizer: MakeOptimizer | None = None,
        scale_limit: float = 0.3,
        clip: float | None = 1e-3,
        noise: float = 0.0,
        mass: float | None = None,
        tau: float = 1.0,
        num_iters: int = 20,
        solver_steps: int = 10,
        **training: Unpack[Training],
    ):
        defaults: Training = {"optimizer": sgd(0.05, weight_decay=0.1), "first_optimizer": adam(1e-3), "reset_norms": True}
        options: Training = {**defaults, **training}
        super().__init__(model, loss, **options)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
        if fusion not in ("code", "paper"):
            raise ValueError(f"fusion must be 'code' or 'paper', got {fusion!r}")
        if not 0 <= share_after_fusion < 1 or (share_after_fusion and not residual):
            raise ValueError(f"share_after_fusion must lie in [0, 1), and needs a residual; got {share_after_fusion}")
        if recall < 0:
            raise ValueError(f"recall must not be negative, got {recall}")
        if recall and not self.memory.per_class:
            raise ValueError("recall stores outputs with the memory: it needs memory_per_class of at least 1")
        if clip is not None and clip <= 0:
            raise ValueError(f"clip must be positive, or None for no bound; got {clip}")
        if scale_limit <= 0:
            raise ValueError(f"scale_limit must be positive, got {scale_limit}")
        if mass is not None and not 0 < mass < 1:
            raise ValueError(f"mass must lie between 0 and 1, got {mass}")
        # Called once here, so that the operator refuses bad options now and not after the first task.
        sinkhorn(torch.zeros(1, 1), tau, num_iters, solver_steps=solver_steps)
        check_weighting(weighting)
        self.symmetry = symmetry.bind(model).restrict(groups)
        if not self.symmetry.groups and not residual:
            raise ValueError("without groups to permute and without a residual there is nothing to learn with")
        self.alpha, self.fusion, self.residual, self.share_after_fusion = alpha, fusion, residual, share_after_fusion
        self.weighting: Weighting = weighting
        self.recall, self.stores_outputs = recall, recall > 0
        self.plan_optimizer = plan_optimizer or adam(0.1)
        self.scale_optimizer, self.scale_limit = scale_optimizer or adam(0.003), scale_limit
        self.clip, self.noise, self.mass = clip, noise, mass
        self.tau, self.num_iters, self.solver_steps = tau, num_iters, solver_steps

    def cost(self) -> Tensor:
        """The loss on a batch of the first task, which is trained as usual."""
        return self.task_loss()

    def phases(self, samples: Samples, num_steps: int) -> Iterator[tuple[Callable[[], None], int]]:
        """Usual training for the first task. For others, plans and residual; then the fusion, and the residual again."""
        if self.num_tasks == 1:
            yield from super().phases(samples, num_steps)
            return
        self.open_feeds(samples, num_steps)
        # A generator of its own, so that the batches are the same with the permutation and without it.
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
        point = SoftMidpoint(self.model, self.symmetry, self._make_net(generator), self.residual, generator)
        num_after = round(self.share_after_fusion * num_steps)
        yield self._make_point_step(point), num_steps - num_after
        transform = None if point.net is None else self._choose_transform(point, point.net, samples)
        unmoved = 1.0 if transform is None else transform.permutation.agreement(transform.symmetry.identity())
        point.harden(transform, self.alpha if self.fusion == "code" else 1 - self.alpha)
        if num_after:
            yield self._make_point_step(point), num_after
        self.model.load_state_dict(point.make_leaves({}), strict=False)  # parameters alone: buffers stay as they are
        self.history.append({"task": float(self.num_tasks - 1), "moved": 1 - unmoved, "residual": point.residual_norm()})

    def _make_point_step(self, point: SoftMidpoint) -> Callable[[], None]:
        """A step on plans, scales and bases, while there are any, and on delta."""
        delta, optimizers = list(point.delta.values()), []
        scales: list[Tensor] = []
        if point.net is not None:
            scales = list(point.net.logarithms)
            optimizers.append(self.make_optimizer(self.plan_optimizer, list(point.net.logits.values())))
            if others := [*point.net.logarithms, *point.net.generators]:
                optimizers.append(self.make_optimizer(self.scale_optimizer, others))
        if delta:
            optimizers.append(self.make_optimizer(self.optimizer, delta))

        def step() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            point.backward(self._cost_at)
            if self.clip is not None and delta:
                torch.nn.utils.clip_grad_value_(delta, self.clip)
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                for logarithms in scales:
                    logarithms.sub_(logarithms.mean()).clamp_(-self.scale_limit, self.scale_limit)

        return step

    def _cost_at(self, params: dict[str, Tensor]) -> Tensor:
        """C, of a network with these parameters."""
        losses = self.losses(params)
        cost = losses.weigh(self.weighting)
        return cost if losses.outputs is None else cost + self.recall * losses.outputs

    def _make_net(self, generator: torch.Generator) -> RebasinNet | None:
        """Plans that start at the identity."""
        if not self.symmetry.groups:
            return None
        start, mass = (None, 0.5) if self.mass is None else (self.symmetry.identity(), self.mass)
        return RebasinNet(
            self.model, self.symmetry, self.tau, self.num_iters, start, self.noise, mass,
            generator=generator, solver_steps=self.solver_steps,
        )  # fmt: skip

    def _choose_transform(self, point: SoftMidpoint, net: RebasinNet, samples: Samples) -> Transform:
        """The assignment on the plans or that on the logits, whichever has the lower loss at the midpoint.

        Batch norms use the statistics of the batch, as in the steps: those they keep are of the soft network.
        """
        size, generator = _NUM_HARDENING_SAMPLES, point.generator
        feeds = [Feed(samples, size, 1, generator, self.members)]
        if len(self.memory):
            feeds.append(Feed(self.memory.samples, size, 1, generator, self.members, partitioned=True))
        batch = Samples.join([feed.draw() for feed in feeds])

        learned = net.transform()

        def complete(permutation: Permutation) -> Transform:
            return Transform(permutation, learned.logarithms, learned.matrices, check=False)

        def cost(permutation: Permutation) -> float:
            with torch.no_grad(), using_batch_statistics(self.model):
                return float(self.loss(self.forward(batch, point.fuse(complete(permutation), 0.5)), batch.targets))

        return complete(net.permutation(cost))
