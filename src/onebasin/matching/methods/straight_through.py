"""The straight-through estimator of Git Re-Basin (Ainsworth et al. 2022, sec. 3.3), for any objective and any symmetry.

A free copy of the parameters is trained. Forward, they are replaced by the permutation of the source that is nearest to them
(weight matching); backward, the gradient goes straight through the replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from onebasin.matching.methods.base import Match, Method, check_count, check_number
from onebasin.matching.methods.weight_matching import sweep
from onebasin.matching.problem import Problem, ignore
from onebasin.tensors.states import StateDict


@dataclass(frozen=True)
class StraightThrough(Method):
    """Train a free copy of the parameters through its nearest permutation of the source.

    Attributes:
        steps: the most steps of Adam to take.
        lr: its step.
        max_sweeps: sweeps of weight matching in each projection.
        patience: stop after so many steps without a better permutation.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(4)]
    >>> loss = nn.functional.cross_entropy
    >>> ob.align(b, to=a, data=data, objective=ob.Midpoint(loss), method=ob.StraightThrough(steps=5)).method
    'ste'
    """

    steps: int = 100
    lr: float = 0.01
    max_sweeps: int = 10
    patience: int = 50

    name: ClassVar[str] = "ste"

    def __post_init__(self) -> None:
        check_count("steps", self.steps, at_least=0)
        check_number("lr", self.lr, above=0)
        check_count("max_sweeps", self.max_sweeps, at_least=1)
        check_count("patience", self.patience, at_least=0)

    def match(self, problem: Problem) -> Match:
        """Project, differentiate at the projection, step, and keep the best projection."""
        free = {key: problem.target[key].detach().clone().requires_grad_() for key in problem.keys}
        optimizer = torch.optim.Adam(list(free.values()), lr=self.lr)
        best = problem.symmetry.identity()
        best_cost, last_gain = problem.cost(best), -1
        stream = problem.stream()
        permutation, hard, cost, step = best, problem.source, best_cost, -1
        for step in range(self.steps if problem.symmetry.groups else 0):
            problem.progress("descent", step, self.steps)
            anchor = StateDict({**problem.target, **{key: value.detach() for key, value in free.items()}})
            projecting = replace(problem, target=anchor, report=ignore, progress=ignore)
            projected, _ = sweep(projecting, permutation, self.max_sweeps)
            if step == 0 or projected != permutation:
                permutation, hard = projected, problem.permuted(projected)
                cost = problem.cost_of(hard)
            problem.report({"step": step, "hard": cost, "best": min(cost, best_cost)})
            if cost < best_cost:
                best, best_cost, last_gain = permutation, cost, step
            if step - last_gain > self.patience:
                break
            through = {key: hard[key].detach() + (free[key] - free[key].detach()) for key in problem.keys}
            optimizer.zero_grad()
            problem.objective(problem.substitute(hard, through), problem.target, next(stream)).backward()
            optimizer.step()
        return Match(best, best_cost, converged=step < self.steps - 1)
