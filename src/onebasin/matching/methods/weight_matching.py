"""Weight matching (Ainsworth et al., "Git Re-Basin", 2022): coordinate descent on the inner product of the weights.

For one group with its neighbours held fixed, the permutation with the largest inner product is a linear assignment. Sweeps
over the groups in random order go on until nothing changes. Nested groups are decided together (see `hardening`). Where a
group is on both axes of one tensor the problem is quadratic: such a step is taken only if the true inner product grows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from onebasin.matching.methods.base import Match, Method, check_choice, check_count
from onebasin.matching.problem import Problem
from onebasin.matching.scores import innermost_axes, member_blocks, products
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.relaxation.plans import plan_shape
from onebasin.symmetries import Group, Permutation, Symmetry
from onebasin.symmetries.layout import names
from onebasin.tensors.states import State


@dataclass(frozen=True)
class WeightMatching(Method):
    """Sweep over the groups until the inner product of the weights grows no more.

    It reads tensors one at a time, so that lazy states are matched without being loaded.

    Attributes:
        max_sweeps: the most sweeps to make.
        order: of the groups in the first sweep. "anchored": first those beside inputs and outputs, whose order is known,
            then those beside groups that have been decided; scores mean something from the first group on, and sweeps are
            few. "random": as in the paper. The later sweeps go in random order.
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
    touched = [_touched_keys(symmetry, problem.keys, groups) for groups in sets]
    stale = set(range(len(sets)))  # decided again only if a tensor they score has changed: the answer would be the same
    for number_of_sweep in range(max_sweeps):
        num_moved = 0
        order = torch.randperm(len(sets), generator=generator).tolist()
        if anchored and number_of_sweep == 0:
            order = _order_from_anchors(symmetry, sets, touched)
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
            gain = _inner(after, problem.target, keys) - (before := _inner(current, problem.target, keys))
            # Ties are broken in some way or other by the assignment: a step that gains nothing would go round in circles.
            if gain > 1e-12 * abs(before) + (0.0 if exact else 1e-12):
                num_moved, total, current = num_moved + 1, following, after
                others = (n for n, theirs in enumerate(touched) if not set(theirs).isdisjoint(keys))
                stale |= {n for n in others if n != number or not exact}
        inner = _inner(current, problem.target, problem.keys)
        problem.report({"sweep": number_of_sweep, "moved": num_moved, "inner": inner})
        if not num_moved:
            return total, True
    return total, False


def _touched_keys(symmetry: Symmetry, keys: tuple[str, ...], groups: list[Group]) -> list[str]:
    """The parameters that some groups move."""
    members = {g.name for g in groups}
    return [key for key in keys if names(symmetry.layouts[key]) & members]


def _order_from_anchors(symmetry: Symmetry, sets: list[list[Group]], touched: list[list[str]]) -> list[int]:
    """Sets of groups in the order in which their scores can be trusted.

    Next comes the set with the largest share of entries in tensors whose other groups are all decided, or that has none.
    """
    owners = {group.name: number for number, groups in enumerate(sets) for group in groups}
    beside = {
        key: {owners[name] for name in names(symmetry.layouts[key]) if name in owners} for keys in touched for key in keys
    }
    sizes = {key: math.prod(term.size for term in symmetry.layouts[key]) for key in beside}
    order: list[int] = []
    left = set(range(len(sets)))

    def share(number: int) -> float:
        decided = sum(sizes[key] for key in touched[number] if not beside[key] & left - {number})
        return decided / max(sum(sizes[key] for key in touched[number]), 1)

    while left:
        best = max(sorted(left), key=share)
        order.append(best)
        left.remove(best)
    return order


def _inner(state: State, target: State, keys: list[str] | tuple[str, ...]) -> float:
    inner = [torch.dot(state[k].reshape(-1), target[k].reshape(-1)).double() for k in keys]
    return float(torch.stack(inner).sum()) if inner else 0.0


def score(problem: Problem, source: State, groups: list[Group], keys: list[str]) -> tuple[dict[str, Tensor], bool]:
    """For each of some joint groups, the inner products of target and source units, in the shape of its plan.

    Returns:
        The scores, and whether they are exact: not where a tensor has the groups on it more than once.
    """
    symmetry = problem.symmetry
    members = {g.name: g for g in groups}
    scores = {g.name: torch.zeros(plan_shape(symmetry, g), dtype=problem.dtype, device=problem.device) for g in groups}
    exact = True
    for key in keys:
        for block in member_blocks(symmetry.layouts[key], members, problem.target[key], source[key]):
            innermost = innermost_axes(members, block)
            exact = exact and len(innermost) == 1
            for axis, chain in innermost.items():
                target, own = block.tensors
                scores[block.labels[axis] or ""] += products(symmetry, target, own, chain, block.labels)
    return scores, exact
