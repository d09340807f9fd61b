"""Incremental learning by re-basin: the paper's strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Feed, Samples
from onebasin.continual.strategies.base import Loss, MakeOptimizer, Strategy, Training, Weighting, adam, sgd
from onebasin.continual.strategies.halfway import HalfWay
from onebasin.continual.strategies.replay import check_weighting
from onebasin.operator import sinkhorn
from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Permutation, Symmetry

Fusion = Literal["code", "paper"]
_NUM_JUDGES = 500


class RebasinStrategy(Strategy):
    """Algorithm 1 of the paper: move along the line between a network and a permutation of it, and a little off that line.

    For each task but the first, plans P and a residual delta are found together (eq. clcost),

        minimise C((theta + pi_P(theta)) / 2 + delta) + beta |delta|^2

    over the task and the memory; then the plans are hardened and the networks fused (eq. clrebasin_newmodel). The first task
    is plain training. The weight decay of `optimizer` is beta.

    Args:
        model: where to start.
        symmetry: of the model, from `onebasin.symmetry`.
        loss: ``loss(output, target)``.
        alpha: weight of the network as it was in the fusion.
        fusion: "code": theta' = alpha theta + (1 - alpha) pi(theta) + delta, as the authors ran it; "paper": alpha and
            1 - alpha exchanged, as they wrote it.
        weighting: "pooled" takes the mean over the batches of task and memory, "equal" the average of the two means.
        recall: weight of the answers that the network gave on the memory when each task was done, as in `DERPlusPlus`. C may
            be any cost; this one is not the paper's. 0 keeps no answers.
        groups: which groups to permute, as shell patterns; all if None, none (delta alone) if empty.
        residual: whether there is a delta.
        settle: share of the steps that come after the fusion and go on with delta there. The paper has none: what it
            minimised, soft and half way, is not what it keeps.
        plan_optimizer: for the logits of the plans; Adam with a step of 0.1 if not given.
        clip: bound on each entry of the task's gradient in delta; None for no bound. With weight decay beta no entry of
            delta grows beyond clip / beta.
        noise: standard deviation of the noise on the identity that the logits start from.
        mass: start from an identity whose plan holds this mass on the diagonal, whatever its size, instead of the paper's.
        tau: temperature of the Sinkhorn operator.
        num_iters: its rounds.
        solver_steps: the most steps of its gradient's solver. Plans grow sharp, and to reach rounding would take dozens; the
            gradient of a random batch does not need that.
        training: see `Training`. Here `optimizer` is for delta, and SGD with a step of 0.05 and weight decay 0.1 if not
            given; `first_optimizer` is Adam with a step of 1e-3; and `reset_norms` is on, because no step has seen the
            fused network.
    """

    replays = True

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
        settle: float = 0.0,
        plan_optimizer: MakeOptimizer | None = None,
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
        if not 0 <= settle < 1 or (settle and not residual):
            raise ValueError(f"settle must be a share of the steps, below 1, and needs a residual; got {settle}")
        if recall < 0:
            raise ValueError(f"recall must not be negative, got {recall}")
        if recall and not self.memory.per_class:
            raise ValueError("recall keeps answers beside the memory: it needs memory_per_class of at least 1")
        if clip is not None and clip <= 0:
            raise ValueError(f"clip must be positive, or None for no bound; got {clip}")
        if mass is not None and not 0 < mass < 1:
            raise ValueError(f"mass must lie between 0 and 1, got {mass}")
        # What the operator refuses, it should not refuse after the first task.
        sinkhorn(torch.zeros(1, 1), tau, num_iters, solver_steps=solver_steps)
        check_weighting(weighting)
        self.symmetry = symmetry.bind(model).restrict(groups)
        if not self.symmetry.groups and not residual:
            raise ValueError("without groups to permute and without a residual there is nothing to learn with")
        self.alpha, self.fusion, self.residual, self.settle = alpha, fusion, residual, settle
        self.weighting: Weighting = weighting
        self.recall, self.recalls = recall, recall > 0
        self.plan_optimizer = plan_optimizer or adam(0.1)
        self.clip, self.noise, self.mass = clip, noise, mass
        self.tau, self.num_iters, self.solver_steps = tau, num_iters, solver_steps
        self.history: list[dict[str, float]] = []

    def phases(self, samples: Samples, num_steps: int) -> Iterator[tuple[Callable[[], None], int]]:
        """Plain training for the first task; plans and residual afterwards, the fusion, and the residual again."""
        if self.num_tasks == 1:
            yield from super().phases(samples, num_steps)
            return
        self.open_feeds(samples, num_steps)
        # Of its own: with the permutation and without it, the batches are the same.
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
        here = HalfWay(self.model, self.symmetry, self._make_net(generator), self.residual, generator)
        last = round(self.settle * num_steps)
        yield self._make_step(here), num_steps - last
        permutation = None if here.net is None else self._harden(here, here.net, samples)
        still = 1.0 if permutation is None else permutation.agreement(permutation.symmetry.identity())
        here.settle(permutation, self.alpha if self.fusion == "code" else 1 - self.alpha)
        if last:
            yield self._make_step(here), last
        self._load(here.place({}))
        self.history.append({"task": float(self.num_tasks - 1), "moved": 1 - still, "residual": here.residual_length()})

    def _make_step(self, here: HalfWay) -> Callable[[], None]:
        delta, optimizers = list(here.delta.values()), []
        if here.net is not None:
            optimizers.append(self.make_optimizer(self.plan_optimizer, list(here.net.parameters())))
        if delta:
            optimizers.append(self.make_optimizer(self.optimizer, delta))

        def step() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            here.backward(self._cost)
            if self.clip is not None and delta:
                torch.nn.utils.clip_grad_value_(delta, self.clip)
            for optimizer in optimizers:
                optimizer.step()

        return step

    def _cost(self, params: dict[str, Tensor]) -> Tensor:
        """C, at a point."""
        losses = self.losses(params)
        cost = losses.weigh(self.weighting)
        return cost if losses.kept is None else cost + self.recall * losses.kept

    def _make_net(self, generator: torch.Generator) -> RebasinNet | None:
        """Plans that start at the identity."""
        if not self.symmetry.groups:
            return None
        start, mass = (None, 0.5) if self.mass is None else (self.symmetry.identity(), self.mass)
        return RebasinNet(
            self.model,
            self.symmetry,
            self.tau,
            self.num_iters,
            start,
            self.noise,
            mass,
            generator=generator,
            solver_steps=self.solver_steps,
        )

    def _harden(self, here: HalfWay, net: RebasinNet, samples: Samples) -> Permutation:
        """The assignment on the plans or that on the logits: the one that costs less half way, on task and memory."""
        feeds = [Feed(samples, _NUM_JUDGES, 1, here.generator, self.members)]
        if len(self.memory):
            feeds.append(Feed(self.memory.samples, _NUM_JUDGES, 1, here.generator, self.members, own=True))
        judges = Samples.join([feed.draw() for feed in feeds])

        def cost(permutation: Permutation) -> float:
            with torch.no_grad():
                return float(self.loss(self.answer(judges, here.fuse(permutation, 0.5)), judges.targets))

        return net.permutation(cost)

    def _load(self, params: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(params[name])

    def state_dict(self) -> dict[str, Any]:
        """With the history."""
        return {**super().state_dict(), "history": [dict(entry) for entry in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        super().load_state_dict(state)
        self.history = [dict(entry) for entry in state["history"]]
