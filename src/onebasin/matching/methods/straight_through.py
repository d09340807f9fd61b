"""The straight-through estimator of Git Re-Basin (Ainsworth et al. 2022, sec. 3.3), for any objective and any symmetry.

A free copy of the parameters is trained. Forward, they are replaced by the permutation of the source that is nearest to them
(weight matching); backward, the gradient goes straight through the replacement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from onebasin.matching.methods.weight_matching import polish
from onebasin.matching.problem import Found, Problem


def match_straight_through(
    problem: Problem, steps: int = 100, lr: float = 0.01, max_sweeps: int = 10, patience: int = 50
) -> Found:
    """Train a free copy of the parameters through its nearest permutation of the source.

    Args:
        problem: what to match.
        steps: the most steps of Adam to take.
        lr: its step.
        max_sweeps: sweeps of weight matching in each projection.
        patience: stop after so many steps without a better permutation.
    """
    start = {key: problem.target[key] for key in problem.keys}
    free = {key: value.detach().clone().requires_grad_() for key, value in start.items()}
    optimizer = torch.optim.Adam(list(free.values()), lr=lr)
    best = problem.symmetry.identity()
    best_cost, last_gain = problem.cost(best), -1
    history: list[dict[str, Any]] = []
    stream = problem.stream()
    permutation, hard, cost, step = best, problem.source, best_cost, 0
    for step in range(steps if problem.symmetry.groups else 0):
        problem.track("descent", step, steps)
        anchor = {**problem.target, **{key: value.detach() for key, value in free.items()}}
        projected = polish(replace(problem, target=anchor, report=_silent), permutation, max_sweeps)
        if step == 0 or projected != permutation:
            permutation, hard = projected, problem.permuted(projected)
            cost = problem.cost_of(hard)
        entry = {"step": step, "hard": cost, "best": min(cost, best_cost)}
        history.append(entry)
        problem.report(entry)
        if cost < best_cost:
            best, best_cost, last_gain = permutation, cost, step
        if step - last_gain > patience:
            break
        through = {key: hard[key].detach() + (free[key] - free[key].detach()) for key in problem.keys}
        tied = {key: keys[0] for keys in problem.symmetry.ties for key in keys if keys[0] in through}
        params = {key: through.get(tied.get(key, key), value) for key, value in hard.items()}
        optimizer.zero_grad()
        problem.objective(problem.fresh(params), problem.target, next(stream)).backward()
        optimizer.step()
    return Found(best, best_cost, history, converged=step < steps - 1)


def _silent(entry: dict[str, Any]) -> None:
    """Projections are not steps of their own."""
