"""Descents on plans that are kept close to permutations, and steps between permutations along a gradient.

Methods that `benchmarks.hard_descents` compares; each is tried there, none is part of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import onebasin as ob
from onebasin.matching.methods import Match, Method
from onebasin.matching.methods.sinkhorn import make_optimizer
from onebasin.matching.problem import Problem
from onebasin.matching.scores import score, touched_keys
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.relaxation.plans import plans_of
from onebasin.symmetries import Group, Permutation
from onebasin.tensors.states import State, StateDict

Plans = dict[str, Tensor]


@dataclass(frozen=True)
class GuidedDescent(Method):
    """Adam on logits that start sharp, as `onebasin.Sinkhorn`, with something that keeps the plans near permutations.

    Attributes:
        steps: of Adam.
        lr: its step, see `onebasin.Sinkhorn`.
        mass: of each plan on the start.
        distance: weight of the mass that the plans have off the start, its mean over the groups.
        entropy: weight of the entropy of the plans, its mean over all rows.
        noise: scale of Gumbel noise that is added to the logits, new at each step.
        radius: how far each logit may move from its start; None for no limit.
        is_hard: the loss sees the permutation that the plans harden to, and its gradient goes to the plans.
        check_every: steps between two looks at the hard permutation.
    """

    steps: int = 100
    lr: float = 0.2
    mass: float = 0.99
    distance: float = 0.0
    entropy: float = 0.0
    noise: float = 0.0
    radius: float | None = None
    is_hard: bool = False
    check_every: int = 5

    name: ClassVar[str] = "guided descent"

    def match(self, problem: Problem) -> Match:
        """The best of the permutations that the plans hardened to, and the start."""
        best = problem.symmetry.identity()
        lowest = problem.cost(best)
        net = ob.RebasinNet(problem.model or problem.source, problem.symmetry, init=best, mass=self.mass)
        starts = [logits.detach().clone() for logits in net.parameters()]
        optimizer, stream = make_optimizer(net, "adam", self.lr), problem.stream()
        for step in range(1, self.steps + 1):
            optimizer.zero_grad()
            self._measure(problem, net, next(stream)).backward()
            optimizer.step()
            with torch.no_grad():
                for logits, start in zip(net.parameters(), starts, strict=True):
                    if self.radius is not None:
                        logits.copy_(start + (logits - start).clamp(-self.radius, self.radius))
            if step % self.check_every == 0:
                found = net.permutation(problem.cost)
                cost = problem.cost(found)
                best, lowest = (found, cost) if cost < lowest else (best, lowest)
                problem.report({"step": step, "hard": cost, "best": lowest})
        return Match(best, lowest, converged=False)

    def _measure(self, problem: Problem, net: ob.RebasinNet, batch: Any) -> Tensor:
        """The objective with this step's plans, and the penalties."""
        noisy = {size: logits + self.noise * _draw_gumbel(logits) for size, logits in net.logits.items()}
        plans = net.unstack({size: ob.sinkhorn(logits, solver_steps=net.solver_steps) for size, logits in noisy.items()})
        seen = plans
        if self.is_hard:
            hard = plans_of(net.candidates(plans)[0], problem.dtype)
            seen = {name: hard[name] + plan - plan.detach() for name, plan in plans.items()}
        cost = problem.objective(net(problem.source, seen), problem.target, batch)
        if self.distance:
            off = [1 - plan.diagonal(dim1=-2, dim2=-1).mean() for plan in plans.values()]
            cost = cost + self.distance * torch.stack(off).mean()
        if self.entropy:
            rows = [torch.special.entr(plan).sum(-1).flatten() for plan in plans.values()]
            cost = cost + self.entropy * torch.cat(rows).mean()
        return cost


def _draw_gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


@dataclass(frozen=True)
class FrankWolfe(Method):
    """Assign by the gradient of the objective at the permutation itself, group by group, as long as fresh batches agree.

    The scores of a group are minus the gradient times the units: their assignment is the permutation that lowers the
    objective most if it were linear, which it is not. A reward for staying keeps all but the strongest moves out.

    Attributes:
        rounds: passes over the groups.
        rewards: for units that stay, as shares of the largest gain of any unit; the best is taken.
        num_gradient: batches for the gradient.
        num_trial: batches on which the rewards are compared.
        num_confirm: fresh batches on which the best must lower the objective.
    """

    rounds: int = 3
    rewards: Sequence[float] = (0.0,)
    num_gradient: int = 8
    num_trial: int = 2
    num_confirm: int = 4

    name: ClassVar[str] = "Frank-Wolfe"

    def match(self, problem: Problem) -> Match:
        """Steps from the identity; the start, if they end higher on the batches that permutations are compared on."""
        total, current, stream = problem.symmetry.identity(), problem.source, problem.stream()
        start = problem.cost(total)
        generator = torch.Generator().manual_seed(problem.seed)
        sets = joint_groups(problem.symmetry)
        for number in range(self.rounds):
            for place in torch.randperm(len(sets), generator=generator).tolist():
                batches = [next(stream) for _ in range(self.num_gradient + self.num_trial + self.num_confirm)]
                update = self._step(problem, current, sets[place], batches)
                if not update.is_identity:
                    current, total = _move(problem, current, update), update @ total
            problem.report({"round": number})
        cost = problem.cost(total)
        return Match(total, cost, True) if cost < start else Match(problem.symmetry.identity(), start, True)

    def _step(self, problem: Problem, current: State, groups: list[Group], batches: Sequence[Any]) -> Permutation:
        """The best update of some groups; the identity if none lowers the objective on the last of the batches."""
        gradient, rest = _differentiate(problem, current, batches[: self.num_gradient]), batches[self.num_gradient :]
        keys = touched_keys(problem.symmetry, problem.keys, groups)
        scores, _ = score(replace(problem, target=gradient), current, groups, keys)
        updates = [harden(problem.symmetry, _reward(scores, share), groups) for share in self.rewards]
        updates = [update for update in updates if not update.is_identity]
        if not updates:
            return problem.symmetry.identity()
        trial, confirm = rest[: self.num_trial], rest[self.num_trial :]
        best = min(updates, key=lambda update: _judge(problem, _move(problem, current, update), trial))
        falls = _judge(problem, _move(problem, current, best), confirm) < _judge(problem, current, confirm)
        return best if falls else problem.symmetry.identity()


def _reward(scores: Plans, share: float) -> Plans:
    """Scores with a reward on the diagonal."""
    rewarded = {}
    for name, values in scores.items():
        own = values.diagonal(dim1=-2, dim2=-1)
        largest = (values - own.unsqueeze(-1)).max()
        rewarded[name] = values + share * largest * torch.eye(values.shape[-1], dtype=values.dtype)
    return rewarded


def _differentiate(problem: Problem, current: State, batches: Sequence[Any]) -> StateDict:
    """Minus the mean gradient of the objective in the tensors of the source."""
    live = {key: current[key].detach().clone().requires_grad_() for key in problem.keys}
    for batch in batches:
        (-problem.objective(problem.substitute(current, live), problem.target, batch) / len(batches)).backward()
    return StateDict({key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in live.items()})


@torch.no_grad()
def _judge(problem: Problem, params: State, batches: Sequence[Any]) -> float:
    costs = [problem.objective.judge(problem.fresh(params), problem.target, batch) for batch in batches]
    return float(torch.stack(costs).mean())


def _move(problem: Problem, current: State, update: Permutation) -> State:
    return StateDict({key: update.move(value, problem.symmetry.layouts[key]) for key, value in current.items()})
