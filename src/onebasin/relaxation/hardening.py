"""From scores for every group to the best hard permutation, nested groups included."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.relaxation.assignment import Solution, Start, assign_all
from onebasin.relaxation.plans import pair_index
from onebasin.symmetries import Group, Permutation, Symmetry


def joint_groups(symmetry: Symmetry) -> list[list[Group]]:
    """Sets of groups that must be decided together, each family with its free ancestors, ancestors first."""
    roots: dict[str, str] = {}
    found: dict[str, list[Group]] = {}
    for group in sorted(symmetry.groups.values(), key=lambda g: len(g.parents)):
        above = next((p for p in group.parents if p in symmetry.groups), None)
        roots[group.name] = group.name if above is None else roots[above]
        found.setdefault(roots[group.name], []).append(group)
    return list(found.values())


class Hardening(NamedTuple):
    """Scores to decide by, see `harden` for what they are."""

    scores: Mapping[str, Tensor]
    carry: bool = True
    starts: dict[str, Start] | None = None


def harden(
    symmetry: Symmetry,
    scores: Mapping[str, Tensor],
    groups: Iterable[Group] | None = None,
    carry: bool = True,
    starts: dict[str, Start] | None = None,
) -> Permutation:
    """The permutation with the highest total score; exact within each set of joint groups.

    For each pair (target h, source j) of a parent, the best inner permutation is found first; its value joins the score of
    the pair; then the parent is assigned, and of the inner ones those of the chosen pairs are kept.

    Args:
        symmetry: whose groups to decide.
        scores: for each group, larger is better, in the shape of its plan.
        groups: decide these only; the others stay as they are.
        carry: let the value of inner permutations count for the parent.
        starts: what an earlier call with similar scores has left here, and where this one leaves the same for the next. The
            answer is as exact, and found faster on a GPU. On the CPU nothing is left: duals cost more than they save.
    """
    return harden_all(symmetry, [Hardening(scores, carry, starts)], groups)[0]


def harden_all(
    symmetry: Symmetry, hardenings: Sequence[Hardening], groups: Iterable[Group] | None = None
) -> list[Permutation]:
    """`harden` for several scores of the same groups, whose assignments are solved together, on several threads."""
    chosen = list(symmetry.groups.values()) if groups is None else list(groups)
    chosen.sort(key=lambda g: len(g.parents))
    decided = [_Decided(symmetry, each, chosen) for each in hardenings]
    for _, level in itertools.groupby(reversed(chosen), key=lambda g: len(g.parents)):
        pairs = [(each, group) for group in level for each in decided]
        found = assign_all([each.scores[g.name] for each, g in pairs], [each.starts.get(g.name) for each, g in pairs])
        for (each, group), solution in zip(pairs, found, strict=True):
            each.take(group, solution)
    return [each.permutation(chosen) for each in decided]


class _Decided:
    """The groups of one hardening that have been assigned, children before their parents."""

    def __init__(self, symmetry: Symmetry, hardening: Hardening, groups: Iterable[Group]):
        self.symmetry, self.hardening = symmetry, hardening
        self.scores = {group.name: hardening.scores[group.name].detach() for group in groups}
        self.starts = hardening.starts or {}
        self.best: dict[str, Tensor] = {}

    def take(self, group: Group, solution: Solution) -> None:
        """Keep an assignment; its value joins the scores of the parent."""
        index, prices, solved = solution
        if self.hardening.starts is not None and prices is not None and solved.any():
            self.hardening.starts[group.name] = Start(prices, index)
        self.best[group.name] = index.cpu()
        parent = next((p for p in reversed(group.parents) if p in self.scores), None)
        if self.hardening.carry and parent is not None:
            value = self.scores[group.name].gather(-1, index.unsqueeze(-1)).sum((-1, -2))
            self.scores[parent] = self.scores[parent] + _towards(self.symmetry, value, group, self.symmetry.groups[parent])

    def permutation(self, groups: Iterable[Group]) -> Permutation:
        """What was assigned, ancestors first: which of a child's permutations are kept depends on theirs."""
        permutation = Permutation(self.symmetry, self.symmetry.identity_indices, check=False)
        for group in groups:
            permutation.indices[group.name] = self.best[group.name][pair_index(permutation, group)]
        return permutation


def carry_to_parents(symmetry: Symmetry, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores in which a parent has those of its children too, for children that keep their order within it."""
    total = dict(scores)
    for name in sorted(scores, key=lambda name: -len(symmetry.groups[name].parents)):
        group = symmetry.groups[name]
        parent = next((p for p in reversed(group.parents) if p in total), None)
        if parent is not None:
            value = total[name].diagonal(dim1=-2, dim2=-1).sum(-1)
            total[parent] = total[parent] + _towards(symmetry, value, group, symmetry.groups[parent])
    return total


def _towards(symmetry: Symmetry, value: Tensor, child: Group, parent: Group) -> Tensor:
    """The value of a child's best permutations in the shape of the parent's scores: summed over all other parents."""
    wanted = (*parent.parents, parent.name)
    axis = 0
    for name in child.parents:
        free = name in symmetry.groups
        if name in wanted:
            axis += 2 if free else 1
        elif free:  # not an ancestor of the parent: it stays as it is, so target and source are the same
            value = value.diagonal(dim1=axis, dim2=axis + 1).sum(-1)
        else:
            value = value.sum(axis)
    return value


def joint_weights(symmetry: Symmetry, plans: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores whose best permutation is the projection of the soft one: a child counts with the weight of its parents."""
    result = {}
    inner = {p for group in symmetry.groups.values() for p in group.parents}
    for name, group in symmetry.groups.items():
        weight = plans[name]
        for parent in group.parents:
            if parent in symmetry.groups:
                weight = weight * _expand(symmetry, plans[parent], symmetry.groups[parent], group)
        # The mass of a parent is already in its children's.
        result[name] = torch.zeros_like(weight) if name in inner else weight
    return result


def _expand(symmetry: Symmetry, plan: Tensor, parent: Group, child: Group) -> Tensor:
    """A parent's plan, broadcast over the axes of a child's plan that it does not have."""
    wanted = (*parent.parents, parent.name)
    axis = 0
    for name in child.parents:
        width = 2 if name in symmetry.groups else 1
        if name not in wanted:
            for _ in range(width):
                plan = plan.unsqueeze(axis)
        axis += width
    return plan[..., None, None]
