"""Weight matching (Ainsworth et al., "Git Re-Basin", 2022): coordinate descent on the inner product of the weights.

For one group with its neighbours held fixed, the permutation with the largest inner product is a linear assignment. Sweeps
over the groups in random order go on until nothing changes. For nested groups the whole tree is decided at once (see
`hardening`). Where a group sits on both axes of one tensor the problem is quadratic: such a step is taken only if the true
inner product grows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor

from onebasin.matching.copies import find_copy
from onebasin.matching.problem import Found, Problem
from onebasin.matching.scores import blocks, find_tips, products
from onebasin.relaxation.hardening import harden, plan_shape, trees
from onebasin.symmetries.layout import factors
from onebasin.symmetries.permutation import Permutation
from onebasin.symmetries.structure import Group, Symmetry

Tensors = Mapping[str, Tensor]


def match_weights(
    problem: Problem, max_sweeps: int = 100, order: Literal["random", "anchored"] = "random", first_look: bool = True
) -> Found:
    """Sweep over the groups until the inner product of the weights grows no more.

    It reads tensors one at a time, so that lazy states are matched without being loaded.

    Args:
        problem: what to match.
        max_sweeps: the most sweeps to make.
        order: of the groups in the first sweep. "anchored": first those that stand beside inputs and outputs, whose order is
            known, then those beside groups that have been decided. The later sweeps go in random order.
        first_look: first see whether the source is a permuted copy of the target, which the sweeps alone may miss.
    """
    if order not in ("random", "anchored"):
        raise ValueError(f"order must be 'random' or 'anchored', got {order!r}")
    history: list[dict] = []
    if first_look and (copied := find_copy(problem)) is not None:
        entry = {
            "sweep": 0,
            "moved": len(trees(problem.symmetry)),
            "inner": _inner(problem.target, problem.target, problem.keys),
        }
        history.append(entry)
        problem.report(entry)
        return Found(copied, problem.cost(copied), history, converged=True)
    generator = torch.Generator().manual_seed(problem.seed)
    start = problem.symmetry.identity()
    permutation, settled = _descend(problem, start, max_sweeps, generator, history, anchored=order == "anchored")
    return Found(permutation, problem.cost(permutation), history, settled)


def polish(
    problem: Problem, permutation: Permutation, max_sweeps: int = 100, only: Collection[str] | None = None
) -> Permutation:
    """The same sweeps from a given permutation, of all groups or of `only` some: can only raise the inner product."""
    generator = torch.Generator().manual_seed(problem.seed)
    return _descend(problem, permutation, max_sweeps, generator, [], only)[0]


def _descend(
    problem: Problem,
    start: Permutation,
    max_sweeps: int,
    generator: torch.Generator,
    history: list[dict],
    only: Collection[str] | None = None,
    anchored: bool = False,
) -> tuple[Permutation, bool]:
    symmetry = problem.symmetry
    total, current = start, problem.permuted(start)
    forest = [tree for tree in trees(symmetry) if only is None or any(group.name in only for group in tree)]
    where = [_touched(symmetry, problem.keys, tree) for tree in forest]
    stale = set(range(len(forest)))  # decided again only if a tensor they score has changed: the answer would be the same
    for sweep in range(max_sweeps):
        moved = 0
        order = torch.randperm(len(forest), generator=generator).tolist()
        if anchored and sweep == 0:
            order = _by_anchors(symmetry, forest, where)
        for done, number in enumerate(order):
            problem.track(f"sweep {sweep + 1}", done, len(forest))
            if number not in stale:
                continue
            stale.remove(number)
            keys = where[number]
            update, exact = _choose(problem, current, forest[number], keys)
            if update.is_identity:
                continue
            following = update @ total
            after = problem.advance(current, update, following, keys)
            gain = _inner(after, problem.target, keys) - (before := _inner(current, problem.target, keys))
            # Ties are broken in some way or other by the assignment: a step that gains nothing would go round in circles.
            if gain > 1e-12 * abs(before) + (0.0 if exact else 1e-12):
                moved, total, current = moved + 1, following, after
                stale |= {
                    n for n, others in enumerate(where) if (n != number or not exact) and not set(others).isdisjoint(keys)
                }
        entry = {"sweep": sweep, "moved": moved, "inner": _inner(current, problem.target, problem.keys)}
        history.append(entry)
        problem.report(entry)
        if not moved:
            return total, True
    return total, False


def _touched(symmetry: Symmetry, keys: tuple[str, ...], tree: list[Group]) -> list[str]:
    """The parameters a tree of groups moves."""
    members = {g.name for g in tree}
    return [k for k in keys if any(f.name in members for term in symmetry.layouts[k] for f in factors(term))]


def _by_anchors(symmetry: Symmetry, forest: list[list[Group]], where: list[list[str]]) -> list[int]:
    """Trees in the order in which their scores can be trusted.

    Next comes the tree with the largest share of entries in tensors whose other groups are all decided, or that has none.
    """
    owners = {group.name: number for number, tree in enumerate(forest) for group in tree}
    beside = {
        key: {owners[f.name] for term in symmetry.layouts[key] for f in factors(term) if f.name in owners}
        for keys in where
        for key in keys
    }
    sizes = {key: math.prod(term.size for term in symmetry.layouts[key]) for key in beside}
    order: list[int] = []
    left = set(range(len(forest)))

    def share(number: int) -> float:
        trusted = sum(sizes[key] for key in where[number] if not beside[key] & left - {number})
        return trusted / max(sum(sizes[key] for key in where[number]), 1)

    while left:
        best = max(sorted(left), key=share)
        order.append(best)
        left.remove(best)
    return order


def _choose(problem: Problem, current: Tensors, tree: list[Group], keys: list[str]) -> tuple[Permutation, bool]:
    """The best permutation of one tree of groups, its neighbours fixed, and whether it is the best for sure."""
    scores, exact = score(problem, current, tree, keys)
    return harden(problem.symmetry, scores, tree), exact


def _inner(state: Tensors, target: Tensors, keys: list[str] | tuple[str, ...]) -> float:
    products = [torch.dot(state[k].reshape(-1), target[k].reshape(-1)).double() for k in keys]
    return float(torch.stack(products).sum()) if products else 0.0


def score(problem: Problem, source: Tensors, tree: list[Group], keys: list[str]) -> tuple[dict[str, Tensor], bool]:
    """For each group of a tree, the inner products of target and source units, in the shape of its plan.

    Returns:
        The scores, and whether they are exact: not where a tensor has the tree on it more than once.
    """
    symmetry = problem.symmetry
    members = {g.name: g for g in tree}
    scores = {g.name: torch.zeros(plan_shape(symmetry, g), dtype=problem.dtype, device=problem.device) for g in tree}
    exact = True
    for key in keys:
        for labels, homes, t, s in blocks(list(symmetry.layouts[key]), problem.target[key], source[key], members):
            tips = find_tips(members, labels, homes)
            exact = exact and len(tips) == 1
            for axis, chain in tips.items():
                scores[labels[axis] or ""] += products(symmetry, t, s, chain, labels)
    return scores, exact
