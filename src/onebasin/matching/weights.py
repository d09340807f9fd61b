"""Weight matching (Ainsworth et al., "Git Re-Basin", 2022): coordinate descent on the inner product of the weights.

For one group with its neighbours held fixed, the permutation with the largest inner product is a linear assignment. Sweeps
over the groups in random order go on until nothing changes. For nested groups the whole tree is decided at once (see
`hardening`). Where a group sits on both axes of one tensor the problem is quadratic: such a step is taken only if the true
inner product grows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from onebasin.hardening import harden, plan_shape, trees
from onebasin.layout import factors
from onebasin.matching.problem import Found, Problem
from onebasin.matching.scores import blocks, chain_of, products
from onebasin.permutation import Permutation
from onebasin.state import State
from onebasin.structure import Group, Symmetry


def match_weights(problem: Problem, max_sweeps: int = 100) -> Found:
    """Sweep over the groups until the inner product of the weights grows no more.

    Args:
        problem: what to match.
        max_sweeps: the most sweeps to make.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    history: list[dict] = []
    permutation, settled = _descend(problem, problem.symmetry.identity(), max_sweeps, generator, history)
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
) -> tuple[Permutation, bool]:
    symmetry = problem.symmetry
    current = problem.permuted(start)
    forest = [tree for tree in trees(symmetry) if only is None or any(group.name in only for group in tree)]
    where = [_touched(symmetry, problem.keys, tree) for tree in forest]
    total = start
    for sweep in range(max_sweeps):
        moved = 0
        for number in torch.randperm(len(forest), generator=generator).tolist():
            update = _improve(problem, current, forest[number], where[number])
            if update is not None:
                moved += 1
                total = update @ total
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


def _improve(problem: Problem, current: State, tree: list[Group], keys: list[str]) -> Permutation | None:
    """Decide one tree of groups, its neighbours fixed; change `current` and return the update if that helps."""
    symmetry = problem.symmetry
    scores, exact = score(symmetry, problem.target, current, tree, keys)
    update = harden(symmetry, scores, tree)
    if all(torch.equal(update[g.name], _identity_like(update[g.name])) for g in tree):
        return None
    moved = {k: update.move(current[k], symmetry.layouts[k]) for k in keys}
    before, after = (_inner(state, problem.target, keys) for state in (current, moved))
    # Ties are broken in some way or other by the assignment: a step that gains nothing would go round in circles.
    if after <= before + 1e-12 * abs(before) + (0.0 if exact else 1e-12):
        return None
    current.update(moved)
    return update


def _identity_like(index: Tensor) -> Tensor:
    return torch.arange(index.shape[-1]).expand(index.shape)


def _inner(state: Mapping[str, Tensor], target: Mapping[str, Tensor], keys: list[str] | tuple[str, ...]) -> float:
    return sum(float(torch.dot(state[k].reshape(-1), target[k].reshape(-1)).double()) for k in keys)


def score(
    symmetry: Symmetry, target: Mapping[str, Tensor], source: Mapping[str, Tensor], tree: list[Group], keys: list[str]
) -> tuple[dict[str, Tensor], bool]:
    """For each group of a tree, the inner products of target and source units, in the shape of its plan.

    Returns:
        The scores, and whether they are exact: not where a tensor has the tree on it more than once.
    """
    members = {g.name: g for g in tree}
    first = target[keys[0]]
    scores = {g.name: torch.zeros(plan_shape(symmetry, g), dtype=first.dtype, device=first.device) for g in tree}
    exact = True
    for key in keys:
        for labels, homes, t, s in blocks(list(symmetry.layouts[key]), target[key], source[key], members):
            places = [axis for axis, name in enumerate(labels) if name in members]
            chains = {axis: chain_of(members, labels, homes, axis) for axis in places}
            tips = [axis for axis in places if not any(axis in chain[:-1] for chain in chains.values())]
            exact = exact and len(tips) == 1
            for axis in tips:
                group = members[labels[axis] or ""]
                scores[group.name] += products(symmetry, t, s, chains[axis], labels)
    return scores, exact
