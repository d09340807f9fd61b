"""Descent on a hard permutation by exchanges of two units: screened by derivatives, judged by the objective itself.

A soft permutation has enough freedom to fit the data by itself: its loss falls below that of either network, and tells
nothing about the hard permutation near it. Exchanges of two units stay hard, and have too little freedom to overfit.

At a hard permutation one backward pass gives the gradient in the source's tensors; with it the first-order effect of every
exchange in a group is a product of matrices. The spread of these effects over batches estimates their curvature (the
empirical Fisher information), and the best by

    effect(i, j) + damping / 2 * curvature(i, j)

are tried one by one on a few batches. Those that lower the objective are applied together, as many as lower it on fresh
batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.matching.methods.base import Match, Method, check_count, check_number
from onebasin.matching.problem import Problem
from onebasin.matching.scores import score
from onebasin.relaxation.hardening import carry_to_parents
from onebasin.symmetries import Group, Permutation
from onebasin.symmetries.layout import names
from onebasin.tensors.states import StateDict
from onebasin.torch_internals import tree_leaves


@dataclass(frozen=True)
class Exchange(Method):
    """Exchange units as long as the objective falls on fresh batches.

    Start it from another method's result, such as ``init="activation-matching"``.

    Attributes:
        rounds: the most passes over the groups; it ends before if a pass changes nothing.
        candidates: exchanges tried per unit, group and round.
        damping: weight of the curvature in the choice of candidates.
        num_gradient: batches for the derivatives, per group.
        num_trial: batches that each candidate is tried on.
        num_confirm: fresh batches that exchanges together must lower the objective on.
        max_seconds: end after this time; None for no limit.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(4)]
    >>> loss = nn.functional.cross_entropy
    >>> method = ob.Exchange(rounds=2)
    >>> result = ob.align(b, to=a, data=data, objective=ob.Midpoint(loss), method=method, init="activation-matching")
    >>> result.method
    'exchange'
    """

    rounds: int = 10
    candidates: float = 2.0
    damping: float = 0.3
    num_gradient: int = 8
    num_trial: int = 2
    num_confirm: int = 4
    max_seconds: float | None = None

    name: ClassVar[str] = "exchange"

    def __post_init__(self) -> None:
        for name in ("rounds", "num_gradient", "num_trial", "num_confirm"):
            check_count(name, getattr(self, name), at_least=1)
        check_number("candidates", self.candidates, above=0)
        check_number("damping", self.damping, at_least=0)
        check_number("max_seconds", self.max_seconds, above=0, optional=True)

    def match(self, problem: Problem) -> Match:
        """Descend from the identity."""
        search = _ExchangeSearch(self, problem)
        begin = time.perf_counter()
        generator = torch.Generator().manual_seed(problem.seed)
        groups = list(problem.symmetry.groups.values())
        converged = False
        for number in range(self.rounds):
            num_exchanged = 0
            for done, place in enumerate(torch.randperm(len(groups), generator=generator).tolist()):
                problem.progress(f"round {number + 1}", done, len(groups))
                num_exchanged += search.improve(number, groups[place])
                if self.max_seconds is not None and time.perf_counter() - begin > self.max_seconds:
                    return search.finish(converged=False)
            if not num_exchanged:
                converged = True
                break
        return search.finish(converged)


Pair = tuple[int, ...]
"""An exchange within a group: the element of each parent, and two units."""


class _ExchangeSearch:
    """The source as it is permuted so far, and what has been tried."""

    def __init__(self, options: Exchange, problem: Problem):
        self.options, self.problem = options, problem
        self.total = problem.symmetry.identity()
        self.current = problem.source.load()
        self.stream = problem.stream()
        capture = problem.device.type == "cuda" and problem.objective.can_be_captured
        self.judge = CapturedStep(self._judge, capture, problem.device)

    def _judge(self, given: tuple[dict[str, Any], Any]) -> Tensor:
        """The objective of hard parameters on a batch."""
        params, batch = given
        with torch.no_grad():
            return self.problem.objective.judge(self.problem.fresh(params), self.problem.target, batch)

    def finish(self, converged: bool) -> Match:
        """Never worse than the start on the batches that permutations are compared on."""
        identity = self.problem.symmetry.identity()
        costs = {id(p): self.problem.cost(p) for p in (self.total, identity)}
        best = self.total if costs[id(self.total)] <= costs[id(identity)] else identity
        return Match(best, costs[id(best)], converged)

    def improve(self, number: int, group: Group) -> int:
        """Exchange units of one group; returns how many pairs."""
        options = self.options
        effects = self._predict(group)
        num_candidates = max(1, int(options.candidates * effects.shape[:-1].numel()))
        candidates = _take_lowest(effects, num_candidates)
        batches = self._take(options.num_trial)
        changes = self._try([[pair] for pair in candidates], group, batches)
        helping = [candidates[i] for i in changes.argsort().tolist() if changes[i] < 0]
        chosen = _make_disjoint(helping)
        # The first 1, 2, 4, ... and all of them together, on fresh batches.
        sizes = sorted({min(1 << k, len(chosen)) for k in range(len(chosen).bit_length() + 1)} - {0})
        gain, kept = 0.0, []
        if sizes:
            together = self._try([chosen[:size] for size in sizes], group, self._take(options.num_confirm))
            gain = float(together.min())
            kept = chosen[: sizes[int(together.argmin())]] if gain < 0 else []
        if kept:
            update = self._make_permutation(group, kept)
            self.total, self.current = update @ self.total, self._apply(update, group)
        self.problem.report({
            "round": number, "group": group.name, "tried": len(candidates), "helping": len(chosen), "exchanged": len(kept),
            "gain": min(gain, 0.0),
        })  # fmt: skip
        return len(kept)

    def _take(self, count: int) -> list[Any]:
        return [next(self.stream) for _ in range(count)]

    def _predict(self, group: Group) -> Tensor:
        """For each pair of units, the change of the objective to second order: (*parents, n, n)."""
        effects = []
        batches = self._take(self.options.num_gradient if self.problem.objective.uses_data else 1)
        for batch in batches:
            gradients = self._differentiate(batch)
            effects.append(_exchange_effects(replace(self.problem, target=gradients), self.current, group))
        stacked = torch.stack(effects)
        if len(batches) == 1:
            return stacked[0]
        curvature = _batch_size(batches[0]) * stacked.var(0)
        return stacked.mean(0) + self.options.damping / 2 * curvature

    def _differentiate(self, batch: Any) -> StateDict:
        """The gradient of the objective in the source's parameters."""
        problem = self.problem
        live = {key: self.current[key].detach().requires_grad_() for key in problem.keys}
        cost = problem.objective(problem.substitute(self.current, live), problem.target, batch)
        found = torch.autograd.grad(cost, list(live.values()), allow_unused=True, materialize_grads=True)
        return StateDict(zip(live, found, strict=True))

    def _try(self, sets: Sequence[Sequence[Pair]], group: Group, batches: Sequence[Any]) -> Tensor:
        """The mean change of the objective by each set of exchanges, on the CPU."""

        def judge(params: StateDict) -> Tensor:
            # Plain dicts: a captured step copies their tensors, and keeps its result until it is called again.
            return torch.stack([self.judge((dict(params), batch)).clone() for batch in batches]).mean()

        base = judge(self.current)
        changed = [judge(self._apply(self._make_permutation(group, pairs), group)) for pairs in sets]
        return (torch.stack(changed) - base).cpu()

    def _make_permutation(self, group: Group, pairs: Sequence[Pair]) -> Permutation:
        identity = self.problem.symmetry.identity_indices
        index = identity[group.name].clone()
        for *parent, i, j in pairs:
            index[(*parent, i)], index[(*parent, j)] = j, i
        return Permutation(self.problem.symmetry, {**identity, group.name: index}, check=False)

    def _apply(self, update: Permutation, group: Group) -> StateDict:
        layouts = self.problem.symmetry.layouts
        keys = (key for key in self.current.shapes if group.name in names(layouts[key]))
        return StateDict({**self.current, **{key: update.move(self.current[key], layouts[key]) for key in keys}})


def _exchange_effects(gradients: Problem, current: StateDict, group: Group) -> Tensor:
    """The first-order effect of exchanging units i and j of a group, (*parents, n, n).

    Args:
        gradients: the problem, with the gradient of the objective in place of the target.
        current: the source's tensors.
        group: whose units are exchanged, with all that depends on them.
    """
    symmetry = gradients.symmetry
    joint = [other for other in symmetry.groups.values() if other == group or group.name in other.parents]
    keys = [key for key in gradients.keys if group.name in names(symmetry.layouts[key])]
    scores, _ = score(gradients, current, joint, keys)
    plan = carry_to_parents(symmetry, scores)[group.name]
    for axis, parent in enumerate(group.parents):  # units are exchanged within one element of each parent
        if parent in symmetry.groups:
            plan = plan.diagonal(dim1=axis, dim2=axis + 1).movedim(-1, axis)
    own = plan.diagonal(dim1=-2, dim2=-1)
    return plan + plan.mT - own.unsqueeze(-1) - own.unsqueeze(-2)


def _take_lowest(effects: Tensor, count: int) -> list[Pair]:
    """The pairs i < j with the lowest effects, at most `count`."""
    n = effects.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=effects.device).triu(1)
    masked = effects.masked_fill(~upper, float("inf"))
    lowest = masked.flatten().topk(min(count, int(upper.sum()) * effects.shape[:-2].numel()), largest=False).indices
    return [tuple(place) for place in torch.stack(torch.unravel_index(lowest, effects.shape), 1).tolist()]


def _make_disjoint(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs in order, without those that have a unit in common with one before."""
    used: set[Pair] = set()
    chosen = []
    for *parent, i, j in pairs:
        units = {(*parent, i), (*parent, j)}
        if used.isdisjoint(units):
            used |= units
            chosen.append((*parent, i, j))
    return chosen


def _batch_size(batch: Any) -> int:
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
