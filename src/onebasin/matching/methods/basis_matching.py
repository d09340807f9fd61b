"""Rotations of units that bring two networks together: the best one in closed form, for one group at a time.

Of all orthogonal matrices M, U V^T raises the inner product of target and M source most, where U and V are the singular
vectors of the cross products of their units (Procrustes). The sum of the singular values is what it reaches: by that members
of a family, such as heads, are paired.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.matching.closest_transforms import EQUAL, can_stretch, distance, stretch
from onebasin.matching.problem import Problem
from onebasin.matching.scores import has_siblings, inner_product, order_from_anchors, score, touched_keys
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.symmetries import Basis, Group, Permutation, Symmetry, Transform
from onebasin.symmetries.basis_matrices import complement_of_ones, turn
from onebasin.symmetries.layout import names
from onebasin.symmetries.multiplication import matrix_shape
from onebasin.tensors.states import State, StateDict

_EXPLAINED = 0.5
"""The share of the squares of a tensor that a scale or a matrix may leave to be taken before all its tensors are known."""
_GAIN, _MAX_ROUNDS = 1e-3, 10
_HELD_ENTRIES = 10**8
"""Of the tensors of a lazy source that are held while a set of groups is decided. More than that are read, and transformed,
each time anew."""


def sole_bases(symmetry: Symmetry) -> dict[str, Basis]:
    """The bases of groups that have no other basis, by name."""
    count = Counter(basis.group for basis in symmetry.bases.values())
    return {name: basis for name, basis in symmetry.bases.items() if count[basis.group] == 1}


def with_pairs(symmetry: Symmetry) -> Symmetry:
    """A symmetry in which two units that a rotary embedding turns together are a group too, which is never permuted."""
    pairs = [basis for basis in symmetry.bases.values() if basis.is_rotary]
    return replace(symmetry, groups={**symmetry.groups, **{b.group: Group(b.group, 2, b.parents) for b in pairs}})


def without_pairs(symmetry: Symmetry, found: Transform) -> Transform:
    """A transform of `with_pairs(symmetry)` as one of the symmetry."""
    indices = {name: found.permutation[name] for name in symmetry.groups}
    return Transform(Permutation(symmetry, indices, check=False), found.logarithms, found.matrices, check=False)


class CrossProducts:
    """Cross products of the units of a group that may be rotated, target times source, in the shape of its plan."""

    def __init__(self, symmetry: Symmetry, basis: Basis, total: Tensor):
        self.symmetry, self.basis = symmetry, basis
        self.total = total.double().cpu()
        if basis.kind == "centred":
            self.total = self.total - self.total.mean(-1, keepdim=True)
            self.total = self.total - self.total.mean(-2, keepdim=True)

    def scores(self) -> Tensor:
        """For `harden`: each pair of members counts as much as its best rotation; inside, nothing is permuted.

        Units that may change their signs are permuted, and each pair of them counts as much as its better sign.
        """
        if self.basis.kind == "signed":
            return self.total.abs()
        size = self.total.shape[-1]
        if not self.symmetry.groups[self.basis.group].parents:  # there is one member, and nothing to compare it with
            return torch.eye(size, dtype=torch.float64)
        if self.basis.is_rotary:
            values = torch.hypot(*_complex_sum(self.total)) / size
        else:
            values = torch.linalg.svdvals(self.total).sum(-1) / size
        return values[..., None, None] * torch.eye(size, dtype=torch.float64)

    def rotations(self, permutation: Permutation) -> Tensor:
        """The best rotation of each member onto the member of the target that it was paired with."""
        group = self.symmetry.groups[self.basis.group]
        chosen = self.total
        if group.parents:
            grid = torch.meshgrid(*(torch.arange(self.symmetry.sizes[p]) for p in group.parents), indexing="ij")
            index: list[Tensor] = []
            for parent, target, source in zip(group.parents, grid, permutation.parent_sources(group), strict=True):
                index += [target, source] if parent in self.symmetry.groups else [target]
            chosen = self.total[tuple(index)]
        if self.basis.kind == "signed":
            paired = chosen.gather(-1, permutation[self.basis.group].unsqueeze(-1)).squeeze(-1)
            return torch.where(paired < 0, -1.0, 1.0).double()
        if self.basis.is_rotary:
            real, imaginary = _complex_sum(chosen)
            return turn(torch.atan2(imaginary, real), torch.ones_like(real))
        if self.basis.kind != "centred":
            return _rotation(chosen)
        inside = complement_of_ones(chosen.shape[-1])
        return inside @ _rotation(inside.mT @ chosen @ inside) @ inside.mT + 1 / chosen.shape[-1]


def _complex_sum(products: Tensor) -> tuple[Tensor, Tensor]:
    """Cross products of two pairs of units as complex numbers: the sum of target times the conjugate of source."""
    return products[..., 0, 0] + products[..., 1, 1], products[..., 1, 0] - products[..., 0, 1]


def _rotation(products: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(products)
    return left @ right


Observe = Callable[[list[Group], list[str], State], bool]
"""Called in the first sweep before each set of groups is decided, with the set, the tensors it is judged by, all of them
beside groups that have been decided, and the source as it is transformed by then. Returns whether to decide the set."""


def sweep_transforms(
    problem: Problem,
    max_sweeps: int,
    start: Transform | None = None,
    only: Collection[str] | None = None,
    observe: Observe | None = None,
) -> tuple[Transform, bool]:
    """Bring the weights together by permutations and rotations, and in the end by scales and invertible matrices.

    In the first sweep a group is judged by the tensors whose other groups have been decided, where there are any: of grouped
    queries, key-value heads and their units by keys and values, then query heads by queries and outputs. Scales and matrices
    are chosen there too if they explain most of these tensors: so a transformed copy is found in one sweep. A problem that
    is started has no such sweep: all tensors count, and what does not bring them closer is not done.

    Args:
        problem: what to match.
        max_sweeps: the most sweeps to make.
        start: what to begin with; the identity if None.
        only: decide these groups, and those nested with them; all if None.
        observe: see `Observe`.

    Returns:
        What to do to the source, and whether the last sweep changed nothing.
    """
    symmetry = with_pairs(problem.symmetry)
    sets = [groups for groups in joint_groups(symmetry) if only is None or any(g.name in only for g in groups)]
    sweeps = _Sweeps(replace(problem, symmetry=symmetry), sets, start, observe)
    is_settled = False
    for number in range(max_sweeps):
        is_settled = sweeps.sweep(number)
        if is_settled:
            break
    if not sweeps.is_equal:
        sweeps.stretch()
    return without_pairs(problem.symmetry, sweeps.total), is_settled


class _Sweeps:
    """The transform so far.

    Args:
        problem: what to match, with pairs as groups.
        sets: of groups that are decided together.
        start: what to begin with.
        observe: see `Observe`.

    Attributes:
        total: the transform.
        current: the source, transformed.
        is_equal: whether that is the target, up to rounding, after the last sweep.
    """

    def __init__(self, problem: Problem, sets: list[list[Group]], start: Transform | None, observe: Observe | None = None):
        self.problem, self.symmetry, self.sets, self.observe = problem, problem.symmetry, sets, observe
        self.touched = [touched_keys(self.symmetry, problem.keys, groups) for groups in sets]
        self.bases = sole_bases(self.symmetry)
        self.decided = self.symmetry.groups.keys() - {group.name for groups in sets for group in groups}
        self.total = Transform(self.symmetry.identity(), {})
        if start is not None:
            indices = {**self.symmetry.identity().indices, **start.permutation.indices}
            moved = Permutation(self.symmetry, indices, check=False)
            self.total = Transform(moved, start.logarithms, start.matrices)
        self.current = self.total.apply(problem.source)
        self.is_equal = False
        self._distances: dict[str, float] = {}  # of tensors that have not changed since they were last in memory

    @functools.cached_property
    def _squares(self) -> float:
        return sum(float(self.problem.target[key].square().sum(dtype=torch.float64)) for key in self.problem.keys)

    def sweep(self, number: int) -> bool:
        """Decide every set of groups once.

        Returns:
            Whether nothing is left to do: no group has moved, or the networks are equal.
        """
        problem, num_moved = self.problem, 0
        for done, position in enumerate(order_from_anchors(self.symmetry, self.sets, self.touched)):
            problem.progress(f"sweep {number + 1}", done, len(self.sets))
            groups, keys = self.sets[position], self.touched[position]
            members = {group.name for group in groups}
            if number == 0 and not problem.is_started:
                judged = _trusted(self.symmetry, keys, self.decided | members)
                step = self._begin(judged or keys)
                if self.observe is not None and not self.observe(groups, judged, step.before):
                    self.decided |= members
                    continue
                judged = judged or keys
                for chosen, telling in _stages(self.symmetry, groups, judged):
                    step = self._extend(step, self._decide(step.after, chosen, telling))
                    update = stretch(problem, step.after, {group.name for group in chosen}, telling, _EXPLAINED)
                    step = self._extend(step, update)
                self._take(step, keys)
                self.decided |= members
                num_moved += 1
                if self.observe is not None:
                    self._turn_again()
                continue
            step = self._begin(keys)
            step = self._extend(step, self._decide(step.before, groups, keys))
            before, after = (inner_product(state, problem.target, keys) for state in (step.before, step.after))
            if after > before + 1e-11 * abs(before):
                num_moved += 1
                self._take(step, keys)
        self._measure(self.current, (key for key in problem.keys if key not in self._distances))
        left = sum(self._distances[key] for key in problem.keys)
        problem.report({"sweep": number, "moved": num_moved, "distance": left})
        self.is_equal = left <= EQUAL * self._squares
        return not num_moved or self.is_equal

    def _turn_again(self) -> None:
        """Rotate groups that have been decided once more, by all the tensors whose groups have been decided by now."""
        for groups, touched in zip(self.sets, self.touched, strict=True):
            members = {group.name for group in groups}
            is_turned = any(b.group in members and b.kind in ("orthogonal", "centred") for b in self.bases.values())
            keys = _trusted(self.symmetry, touched, self.decided)
            if is_turned and members <= self.decided and not self.current.is_lazy:
                step = self._begin(keys)
                step = self._extend(step, self._decide(step.before, groups, keys))
                before, after = (inner_product(state, self.problem.target, keys) for state in (step.before, step.after))
                if after > before:
                    self._take(step, keys)

    def stretch(self) -> None:
        """Choose scales and invertible matrices, set by set, while they bring the networks closer."""
        for _ in range(_MAX_ROUNDS):
            has_moved = False
            for groups, keys in zip(self.sets, self.touched, strict=True):
                members = {group.name for group in groups}
                if not can_stretch(self.symmetry, members):
                    continue
                step = self._begin(keys)
                step = self._extend(step, stretch(self.problem, step.before, members, keys))
                before, after = (distance(state, self.problem.target, keys) for state in (step.before, step.after))
                if after < (1 - _GAIN) * before:
                    has_moved = True
                    self._take(step, keys)
            if not has_moved:
                break

    def _decide(self, current: State, groups: list[Group], keys: list[str]) -> Transform:
        """The best permutation of some groups, and the best rotations after it."""
        bases = {name: basis for name, basis in self.bases.items() if basis.group in {group.name for group in groups}}
        dtype = torch.float64 if bases else None
        scores, _ = score(self.problem, current, groups, keys, dtype)
        mixed: dict[str, CrossProducts] = {}
        found = {name: value.cpu() for name, value in scores.items()}
        for name, basis in bases.items():
            total = scores[basis.group]
            if basis.kind == "signed":  # what stays when all signs are changed, such as gates, counts without signs
                signs = {name: -torch.ones(matrix_shape(self.symmetry, basis))}
                flipped = current.map(Transform(self.symmetry.identity(), {}, signs).move)
                total = (total - score(self.problem, flipped, groups, keys, dtype)[0][basis.group]) / 2
            elif others := [k for k in keys if k not in basis.places and basis.group in names(self.symmetry.layouts[k])]:
                # Gains of norms, for example: a matrix does not change them.
                total = total - score(self.problem, current, groups, others, dtype)[0][basis.group]
            mixed[name] = CrossProducts(self.symmetry, basis, total)
            rest = found[basis.group] - total.cpu() if basis.kind == "signed" else 0
            found[basis.group] = mixed[name].scores() + rest
        permutation = harden(self.symmetry, found, groups)
        matrices = {name: each.rotations(permutation) for name, each in mixed.items()}
        return Transform(permutation, {}, matrices, check=False)

    def _begin(self, keys: list[str]) -> _Step:
        """A step that changes nothing yet, with these tensors in memory unless they are too large for that."""
        current = self.current
        if current.is_lazy and sum(current.shapes[key].numel() for key in keys) <= _HELD_ENTRIES:
            current = StateDict({key: current[key] for key in keys})
        return _Step(self.total, current, current)

    def _extend(self, step: _Step, update: Transform) -> _Step:
        if update.is_identity:
            return step
        total = update @ step.total
        return _Step(total, step.before, self._transform(total) if step.after.is_lazy else step.after.map(update.move))

    def _transform(self, total: Transform) -> State:
        return self.problem.source.map(total.move)

    def _take(self, step: _Step, keys: Iterable[str]) -> None:
        """Accept a step that changes some tensors."""
        for key in keys:
            self._distances.pop(key, None)
        if self.current.is_lazy and not step.after.is_lazy:
            self._measure(step.after, step.after)
        if step.total is not self.total:
            self.current = self._transform(step.total) if self.current.is_lazy else step.after
            self.total = step.total

    def _measure(self, state: State, keys: Iterable[str]) -> None:
        self._distances |= {key: distance(state, self.problem.target, [key]) for key in keys}


class _Step(NamedTuple):
    """A transform that may be accepted, and the source before and after it, of which only some tensors may be there."""

    total: Transform
    before: State
    after: State


def _trusted(symmetry: Symmetry, keys: list[str], decided: Collection[str]) -> list[str]:
    """The tensors on which no other groups are left to decide."""
    return [key for key in keys if names(symmetry.layouts[key]) & symmetry.groups.keys() <= set(decided)]


def _stages(symmetry: Symmetry, groups: list[Group], keys: list[str]) -> Iterator[tuple[list[Group], list[str]]]:
    """Joint groups in the order in which their scores can be trusted, each part with the tensors to judge it by.

    Query heads and value units, for example, are both inside key-value heads, and outputs have both on them: while the order
    of the query heads is unknown, outputs say nothing about value units. Groups that no tensor has on it are left out.
    """
    left = {group.name: group for group in groups}
    while keys := [key for key in keys if names(symmetry.layouts[key]) & left.keys()]:
        telling = [key for key in keys if not has_siblings(symmetry, key, left)] or keys
        found = set().union(*(names(symmetry.layouts[key]) for key in telling))
        yield [group for name, group in left.items() if name in found], telling
        left = {name: group for name, group in left.items() if name not in found}
