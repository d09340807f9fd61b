"""Weight matching (Ainsworth et al., "Git Re-Basin", 2022): coordinate descent on the inner product of the weights.

For one group with its neighbours held fixed, the permutation with the largest inner product is a linear assignment. Sweeps
over the groups in random order go on until nothing changes. Nested groups are decided together (see `hardening`). Where a
group is on both axes of one tensor the problem is quadratic: such a step is taken only if the true inner product grows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from onebasin.matching.methods.base import Match, Method, check_choice, check_count
from onebasin.matching.methods.basis_matching import sweep_transforms
from onebasin.matching.problem import Problem
from onebasin.matching.scores import inner_product, order_from_anchors, score, touched_keys
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.symmetries import Permutation


@dataclass(frozen=True)
class WeightMatching(Method):
    """Sweep over the groups until the inner product of the weights grows no more.

    It reads tensors one at a time, so that lazy states are matched without being loaded.

    Attributes:
        max_sweeps: the most sweeps to make.
        order: of the groups in the first sweep. "anchored": first those beside inputs and outputs, whose order is known,
            then those beside groups that have been decided; scores mean something from the first group on, and sweeps are
            few. "random": as in the paper. The later sweeps go in random order.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method=ob.WeightMatching(max_sweeps=20))
    >>> result.converged
    True
    """

    max_sweeps: int = 100
    order: Literal["anchored", "random"] = "anchored"

    name: ClassVar[str] = "weight-matching"
    reads_lazily: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("max_sweeps", self.max_sweeps, at_least=1)
        check_choice("order", self.order, "anchored", "random")

    def match(self, problem: Problem) -> Match:
        """Sweep from the identity."""
        if problem.symmetry.bases or problem.symmetry.scales:
            found, converged = sweep_transforms(problem, self.max_sweeps)
            cost = problem.cost(found.permutation)
            return Match(found.permutation, cost, converged, logarithms=found.logarithms, matrices=found.matrices)
        start = problem.symmetry.identity()
        permutation, converged = sweep(problem, start, self.max_sweeps, anchored=self.order == "anchored")
        return Match(permutation, problem.cost(permutation), converged)


def sweep(
    problem: Problem,
    start: Permutation,
    max_sweeps: int = 100,
    only: Collection[str] | None = None,
    anchored: bool = False,
) -> tuple[Permutation, bool]:
    """Raise the inner product of the weights from a given permutation.

    Args:
        problem: what to match.
        start: the permutation to begin with.
        max_sweeps: the most sweeps to make.
        only: decide these groups, and those nested with them; all if None.
        anchored: see `WeightMatching.order`.

    Returns:
        A permutation whose inner product is not smaller, and whether the last sweep changed nothing.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    symmetry = problem.symmetry
    total, current = start, problem.permuted(start)
    sets = [groups for groups in joint_groups(symmetry) if only is None or any(g.name in only for g in groups)]
    touched = [touched_keys(symmetry, problem.keys, groups) for groups in sets]
    stale = set(range(len(sets)))  # decided again only if a tensor they score has changed: the answer would be the same
    for number_of_sweep in range(max_sweeps):
        num_moved = 0
        order = torch.randperm(len(sets), generator=generator).tolist()
        if anchored and number_of_sweep == 0:
            order = order_from_anchors(symmetry, sets, touched)
        for done, number in enumerate(order):
            problem.progress(f"sweep {number_of_sweep + 1}", done, len(sets))
            if number not in stale:
                continue
            stale.remove(number)
            keys = touched[number]
            scores, exact = score(problem, current, sets[number], keys)
            update = harden(symmetry, scores, sets[number])
            if update.is_identity:
                continue
            following = update @ total
            after = problem.advance(current, update, following, keys)
            gain = inner_product(after, problem.target, keys) - (before := inner_product(current, problem.target, keys))
            # Ties are broken in some way or other by the assignment: a step that gains nothing would go round in circles.
            if gain > 1e-12 * abs(before) + (0.0 if exact else 1e-12):
                num_moved, total, current = num_moved + 1, following, after
                others = (n for n, theirs in enumerate(touched) if not set(theirs).isdisjoint(keys))
                stale |= {n for n in others if n != number or not exact}
        inner = inner_product(current, problem.target, problem.keys)
        problem.report({"sweep": number_of_sweep, "moved": num_moved, "inner": inner})
        if not num_moved:
            return total, True
    return total, False
