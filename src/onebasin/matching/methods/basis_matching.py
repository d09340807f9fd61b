"""Transforms that bring the weights of two networks together, by sweeps over sets of groups.

Each set has a best element in closed form while all others stay: an assignment of units, and a rotation of those that may
be mixed. Of all orthogonal matrices M, U V^T raises the inner product of target and M source most, where U and V are the
singular vectors of the cross products of their units (Procrustes). Scales and invertible matrices follow by least squares.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from onebasin.matching.anchored_start import AnchoredStart, Observe, order_sets
from onebasin.matching.closest_transforms import ClosestTransforms, can_stretch, distance
from onebasin.matching.problem import Problem
from onebasin.matching.transform_steps import Step, TransformSteps
from onebasin.matching.unit_pairs import UnitPairs
from onebasin.relaxation.hardening import joint_groups
from onebasin.symmetries import Group, Permutation, Symmetry, Transform

_GAIN, _MAX_ROUNDS = 1e-3, 10
_SMALLEST_GAIN = 1e-8
"""The share of the distance that a permutation or rotation must remove: less is rounding."""


def with_pairs(symmetry: Symmetry) -> Symmetry:
    """A symmetry in which two units that a rotary embedding turns together are a group too, which is never permuted."""
    pairs = [basis for basis in symmetry.bases.values() if basis.is_rotary]
    return replace(symmetry, groups={**symmetry.groups, **{b.group: Group(b.group, 2, b.parents) for b in pairs}})


def without_pairs(symmetry: Symmetry, found: Transform) -> Transform:
    """A transform of `with_pairs(symmetry)` as one of the symmetry."""
    indices = {name: found.permutation[name] for name in symmetry.groups}
    return Transform(Permutation(symmetry, indices, check=False), found.logarithms, found.matrices, check=False)


class Swept(NamedTuple):
    """What sweeps found.

    Attributes:
        transform: what to do to the source.
        is_settled: whether the last sweep changed nothing.
        distance: the squared distance that is left.
    """

    transform: Transform
    is_settled: bool
    distance: float


def sweep_transforms(
    problem: Problem,
    max_sweeps: int,
    start: Transform | None = None,
    only: Collection[str] | None = None,
    observe: Observe | None = None,
) -> Swept:
    """Bring the weights together by permutations and rotations, and in the end by scales and invertible matrices.

    The first sweep is that of `AnchoredStart`, which finds a transformed copy. It is taken as a whole if it brings the
    networks closer. After it, a step is taken only if it does. A problem that is started has no such sweep.

    Args:
        problem: what to match.
        max_sweeps: the most sweeps to make.
        start: what to begin with; the identity if None.
        only: decide these groups, and those nested with them; all if None.
        observe: see `Observe`.

    Returns:
        What was found.
    """
    symmetry = with_pairs(problem.symmetry)
    sets = [groups for groups in joint_groups(symmetry) if only is None or any(g.name in only for g in groups)]
    sweeps = _Sweeps(replace(problem, symmetry=symmetry), sets, start, observe)
    is_settled = False
    for number in range(max_sweeps):
        is_settled = sweeps.sweep(number)
        if is_settled:
            break
    if not sweeps.steps.is_equal:
        sweeps.stretch()
    return Swept(without_pairs(problem.symmetry, sweeps.steps.total), is_settled, sweeps.steps.measure())


class _Sweeps:
    """Sweeps over sets of groups.

    Args:
        problem: what to match, with pairs as groups.
        sets: of groups that are decided together.
        start: what to begin with.
        observe: see `Observe`.

    Attributes:
        sets: the same in the order to decide them, with the tensors that they change.
        steps: the transform so far.
    """

    def __init__(self, problem: Problem, sets: list[list[Group]], start: Transform | None, observe: Observe | None = None):
        self.problem, self.symmetry, self.observe = problem, problem.symmetry, observe
        self.sets = order_sets(problem, sets)
        self.closest = ClosestTransforms(self.symmetry)
        self.pairs = UnitPairs(self.closest)
        total = Transform(self.symmetry.identity(), {})
        if start is not None:
            indices = {**self.symmetry.identity().indices, **start.permutation.indices}
            total = Transform(Permutation(self.symmetry, indices, check=False), start.logarithms, start.matrices)
        self.steps = TransformSteps(problem, total)

    def sweep(self, number: int) -> bool:
        """Decide every set of groups once.

        Returns:
            Whether nothing is left to do: no group has moved, or the networks are equal.
        """
        if number == 0 and not self.problem.is_started:
            num_moved = self._start()
        else:
            num_moved = 0
            for done, (groups, keys) in enumerate(self.sets):
                self.problem.progress(f"sweep {number + 1}", done, len(self.sets))
                num_moved += self._improve(groups, keys)
        self.problem.report({"sweep": number, "moved": num_moved, "distance": self.steps.measure()})
        return not num_moved or self.steps.is_equal

    def _start(self) -> int:
        """Begin with an anchored start if it is closer than what was given, with or without scales and matrices.

        Returns:
            The number of sets that were decided.
        """
        given, num_moved = Step(self.steps.total, self.steps.current), 0
        can_stretch_some = can_stretch(self.symmetry, self.symmetry.groups)
        for is_stretched in (True, False) if can_stretch_some and self.observe is None else (True,):
            start = AnchoredStart(self.steps, self.closest, self.pairs, self.sets, is_stretched, self.observe)
            num_moved = start.build()
            if self.steps.total is given.total or self.steps.is_equal:
                break
            if self.steps.measure() < distance(given.after, self.problem.target, self.problem.keys):
                break
            self.steps.go_back(given)
        return num_moved

    def _improve(self, groups: list[Group], keys: list[str]) -> bool:
        """Permute and rotate some groups by all their tensors, and pair units by their best scales, if that is closer."""
        before = self.steps.begin(keys)
        after = self.steps.extend(before, self.pairs.find(self.problem, before.after, groups, keys, fitted=False))
        bases = self.pairs.bases_of(groups)
        after = self.steps.extend(after, self.closest.rotate(self.problem, after.after, bases, keys)[0])
        has_moved = self.steps.take_if_closer(before, after, keys, _SMALLEST_GAIN)
        if not self.pairs.have_scales(groups):
            return has_moved
        before = self.steps.begin(keys)
        after = self.steps.extend(before, self.pairs.find(self.problem, before.after, groups, keys, fitted=True))
        update, _ = self.closest.stretch(self.problem, after.after, {group.name for group in groups}, keys)
        return self.steps.take_if_closer(before, self.steps.extend(after, update), keys, _GAIN) or has_moved

    def stretch(self) -> None:
        """Choose scales and invertible matrices, set by set, while they bring the networks closer."""
        for _ in range(_MAX_ROUNDS):
            has_moved = False
            for groups, keys in self.sets:
                members = {group.name for group in groups}
                if can_stretch(self.symmetry, members):
                    before = self.steps.begin(keys)
                    update, _ = self.closest.stretch(self.problem, before.after, members, keys)
                    has_moved |= self.steps.take_if_closer(before, self.steps.extend(before, update), keys, _GAIN)
            if not has_moved:
                break
