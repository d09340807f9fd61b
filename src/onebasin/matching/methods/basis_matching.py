"""Transforms that bring two networks together by their weights: the best one in closed form, for one set of groups at a time.

Of all orthogonal matrices M, U V^T raises the inner product of target and M source most, where U and V are the singular
vectors of the cross products of their units (Procrustes). Scales and invertible matrices are chosen where they explain most
of the tensors. Heads are paired whatever their bases are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.engines import LOCAL
from onebasin.matching.closest_matrices import Known
from onebasin.matching.closest_transforms import ClosestTransforms, can_stretch, distance
from onebasin.matching.problem import Problem
from onebasin.matching.scores import has_siblings, has_twins, order_from_anchors, touched_keys
from onebasin.matching.unit_pairs import UnitPairs, sole_bases
from onebasin.relaxation.hardening import joint_groups
from onebasin.symmetries import Basis, Group, Permutation, Symmetry, Transform
from onebasin.symmetries.basis_matrices import pair
from onebasin.symmetries.layout import names
from onebasin.tensors.states import State, StateDict

_EXPLAINED = 0.5
"""The share of the squares of a tensor that a scale or a matrix may leave to be taken before all its tensors are known."""
_EXACT = 1e-13
"""The share of the squares that is left between networks that are equal up to the rounding of float32."""
_GAIN, _MAX_ROUNDS = 1e-3, 10
_HELD_ENTRIES = 10**8
"""Of the tensors of a lazy source that are held while a set of groups is decided. More than that are read, and transformed,
each time anew."""


def with_pairs(symmetry: Symmetry) -> Symmetry:
    """A symmetry in which two units that a rotary embedding turns together are a group too, which is never permuted."""
    pairs = [basis for basis in symmetry.bases.values() if basis.is_rotary]
    return replace(symmetry, groups={**symmetry.groups, **{b.group: Group(b.group, 2, b.parents) for b in pairs}})


def without_pairs(symmetry: Symmetry, found: Transform) -> Transform:
    """A transform of `with_pairs(symmetry)` as one of the symmetry."""
    indices = {name: found.permutation[name] for name in symmetry.groups}
    return Transform(Permutation(symmetry, indices, check=False), found.logarithms, found.matrices, check=False)


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
    are chosen there too if they explain most of these tensors: so a transformed copy is found in one sweep. Where tensors do
    not span a basis it is known in part; it is judged by that part alone, and solved again as more tensors can be compared.
    The first sweep is taken as a whole, if it brings the networks closer; after it, every step is taken only if it does. A
    problem that is started has no such sweep.

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
    # Each step needs the one before it, and what is in memory: it is done here.
    sweeps = _Sweeps(replace(problem, symmetry=symmetry, engine=LOCAL), sets, start, observe)
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
        known: of bases that the tensors compared so far do not span, the directions in which they are known.
        unknown: the scales of decided groups that enter none of the tensors compared so far.
        is_equal: whether that is the target, up to rounding, after the last sweep.
    """

    def __init__(self, problem: Problem, sets: list[list[Group]], start: Transform | None, observe: Observe | None = None):
        self.problem, self.symmetry, self.sets, self.observe = problem, problem.symmetry, sets, observe
        self.touched = [touched_keys(self.symmetry, problem.keys, groups) for groups in sets]
        self.closest = ClosestTransforms(self.symmetry)
        self.pairs = UnitPairs(self.closest)
        self.bases = {name: basis for name, basis in sole_bases(self.symmetry).items() if basis.kind != "signed"}
        self.decided = self.symmetry.groups.keys() - {group.name for groups in sets for group in groups}
        self.total = Transform(self.symmetry.identity(), {})
        if start is not None:
            indices = {**self.symmetry.identity().indices, **start.permutation.indices}
            moved = Permutation(self.symmetry, indices, check=False)
            self.total = Transform(moved, start.logarithms, start.matrices)
        self.current = self.total.apply(problem.source)
        self.known: dict[str, Known] = {}
        self.unknown: set[str] = set()
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
        order = order_from_anchors(self.symmetry, self.sets, self.touched)
        if number == 0 and not problem.is_started:
            num_moved = self._build_start(order)
        else:
            for done, position in enumerate(order):
                problem.progress(f"sweep {number + 1}", done, len(self.sets))
                num_moved += self._improve(self.sets[position], self.touched[position])
        left = self._measure_all()
        problem.report({"sweep": number, "moved": num_moved, "distance": left})
        self.is_equal = left <= _EXACT * self._squares
        return not num_moved or self.is_equal

    def _improve(self, groups: list[Group], keys: list[str]) -> bool:
        """Permute and rotate some groups by all their tensors, if that brings these closer."""
        step = self._begin(keys)
        turned = self._turn(self.problem, step, groups, keys)
        before, after = (distance(each.after, self.problem.target, keys) for each in (step, turned))
        if not after < (1 - 1e-11) * before:
            return False
        self._take(turned, keys)
        return True

    def _turn(self, problem: Problem, step: _Step, groups: list[Group], keys: list[str]) -> _Step:
        """The best permutation of some groups as they are, and the best rotations after it."""
        step = self._extend(step, self.pairs.find(problem, step.after, groups, keys, fitted=False))
        return self._extend(step, self.closest.rotate(problem, step.after, self._bases_of(groups), keys)[0])

    def _build_start(self, order: list[int]) -> int:
        """Decide every set by the tensors whose other groups have been decided; go back if that gains nothing.

        Returns:
            The number of sets that were decided.
        """
        begin, num_moved = (self.total, self.current), 0
        while order:
            self.problem.progress("sweep 1", len(self.sets) - len(order), len(self.sets))
            position = self._choose(order)
            order.remove(position)
            groups, keys = self.sets[position], self.touched[position]
            members = {group.name for group in groups}
            judged = self._trusted(keys, members)
            step = self._begin(judged or keys)
            if self.observe is not None and not self.observe(groups, judged, step.after):
                self.decided |= members
                continue
            for chosen, telling in _stages(self.symmetry, groups, judged or keys):
                step = self._settle(step, chosen, telling)
            self._take(step, keys)
            self.decided |= members
            self.unknown |= {
                name
                for name, scale in self.symmetry.scales.items()
                if scale.group in members and scale.powers.keys().isdisjoint(judged or keys)
            }
            num_moved += 1
            self._scale_again()
            self._learn_more(members)
            if self.observe is not None:
                self._turn_again()
        self.known = {}
        left = self._measure_all()
        if left > _EXACT * self._squares and left >= distance(begin[1], self.problem.target, self.problem.keys):
            (self.total, self.current), self._distances = begin, {}
        return num_moved

    def _choose(self, order: list[int]) -> int:
        """The next set to decide: while some basis is known in part, units that are only permuted come first."""
        mixed = {basis.group for basis in self.bases.values()}
        for position in order if self.known else ():
            members = {group.name for group in self.sets[position]}
            if not members & mixed and self._trusted(self.touched[position], members):
                return position
        return order[0]

    def _trusted(self, keys: Iterable[str], members: Collection[str] = ()) -> list[str]:
        """The tensors on which no groups but these are left to decide."""
        symmetry, decided = self.symmetry, self.decided.union(members)
        scaled = {
            key
            for name in self.unknown
            for key in symmetry.scales[name].powers
            if symmetry.scales[name].group not in members
        }
        return [k for k in keys if names(symmetry.layouts[k]) & symmetry.groups.keys() <= decided and k not in scaled]

    def _settle(self, step: _Step, groups: list[Group], keys: list[str]) -> _Step:
        """Permute, rotate and stretch some groups by tensors whose other groups have been decided.

        Units are paired by their best scales and matrices, and as they are: what ends closer is taken. Tensors that have a
        group on several axes count after it has been decided by the others.
        """
        members = {group.name: group for group in groups}
        once = [key for key in keys if not has_twins(self.symmetry, key, members)] or keys
        view, bases = self._see(members), self._bases_of(groups)
        problem = replace(self.problem, target=view(self.problem.target))

        def fit(fitted: bool) -> tuple[_Step, dict[str, Known]]:
            after = self._extend(step, self.pairs.find(problem, view(step.after), groups, once, fitted))
            update, turned = self.closest.rotate(problem, view(after.after), bases, once)
            after = self._extend(after, update)
            update, stretched = self.closest.stretch(problem, view(after.after), members, once, _EXPLAINED)
            known = {name: each for name, each in turned.items() if self.bases[name].kind != "linear"}
            return self._extend(after, update), known | stretched

        def measure(candidate: tuple[_Step, dict[str, Known]]) -> float:
            return distance(view(candidate[0].after), problem.target, once)

        candidates = map(fit, (True, False) if self.pairs.can_fit(groups) else (False,))
        found, known = min(candidates, key=measure) if self.pairs.can_fit(groups) else next(candidates)
        self.known |= known
        if once != keys and not known:
            turned = self._turn(problem, found, groups, keys)
            before, after = (distance(view(each.after), problem.target, keys) for each in (found, turned))
            found = turned if after < before else found
        return found

    def _see(self, members: Collection[str]) -> Callable[[State], State]:
        """Makes a state in which bases of other groups have only the directions in which they are known."""
        plans = {}
        for name, known in self.known.items():
            if self.symmetry.bases[name].group not in members:
                plans |= {each: plan.to(self.problem.device) for each, plan in pair(name, *known).items()}

        def project(key: str, value: Tensor) -> Tensor:
            return self.closest.mixed.mix_with({key: value}, plans).get(key, value)

        return (lambda state: state.map(project)) if plans else (lambda state: state)

    def _learn_more(self, changed: Collection[str]) -> None:
        """Solve bases that are known in part again, by tensors of groups about which something new is known."""
        while changed and self.known:
            grown = set()
            for name in list(self.known):
                basis = self.symmetry.bases[name]
                keys = self._trusted([key for key in self.problem.keys if key in basis.places])
                new = [key for key in keys if self._tells_more(key, basis, changed)]
                # Rotations keep the directions that are known: they are told by the other tensors alone.
                if new and self._solve_again(basis, keys if basis.kind == "linear" else new):
                    grown.add(basis.group)
            changed = grown

    def _scale_again(self) -> None:
        """Choose scales that are not known by tensors whose groups have been decided by now."""
        for name in sorted(self.unknown):
            scale = self.symmetry.scales[name]
            keys = self._trusted([key for key in self.problem.keys if key in scale.powers], {scale.group})
            if keys:
                step, view = self._begin(keys), self._see({scale.group})
                problem = replace(self.problem, target=view(self.problem.target))
                update, _ = self.closest.stretch(problem, view(step.after), {scale.group}, keys, _EXPLAINED)
                self._take(self._extend(step, update), [key for key in self.problem.keys if key in scale.powers])
                self.unknown.discard(name)

    def _tells_more(self, key: str, basis: Basis, changed: Collection[str]) -> bool:
        """Whether what is known of some groups tells more about the part of a basis in a tensor."""
        others = names(self.symmetry.layouts[key]) - {basis.group}
        is_both = len({place.is_dual for place in basis.places[key]}) > 1
        return bool(others & set(changed)) or (is_both and basis.group in changed)

    def _solve_again(self, basis: Basis, keys: list[str]) -> bool:
        """Solve a basis that is known in part.

        Returns:
            Whether more of it is known than before.
        """
        known, view, step = self.known[basis.name], self._see({basis.group}), self._begin(keys)
        problem, current = replace(self.problem, target=view(self.problem.target)), view(step.after)
        if basis.kind == "linear":
            update, found = self.closest.stretch(problem, current, {basis.group}, keys, _EXPLAINED)
        else:
            update, found = self.closest.rotate(problem, current, [basis], keys, {basis.name: known})
        now = found.get(basis.name)
        if now is not None and _rank(now) < _rank(known) + 0.5:
            return False
        del self.known[basis.name]
        if now is not None:
            self.known[basis.name] = now
        self._take(self._extend(step, update), [key for key in self.problem.keys if key in basis.places])
        return True

    def _turn_again(self) -> None:
        """Rotate groups that have been decided once more, by all the tensors whose groups have been decided by now."""
        for groups, touched in zip(self.sets, self.touched, strict=True):
            bases = [basis for basis in self._bases_of(groups) if basis.kind in ("orthogonal", "centred")]
            keys = self._trusted(touched)
            if bases and {group.name for group in groups} <= self.decided and not self.current.is_lazy:
                step = self._begin(keys)
                turned = self._extend(step, self.closest.rotate(self.problem, step.after, bases, keys)[0])
                before, after = (distance(each.after, self.problem.target, keys) for each in (step, turned))
                if after < before:
                    self._take(turned, keys)

    def stretch(self) -> None:
        """Choose scales and invertible matrices, set by set, while they bring the networks closer."""
        for _ in range(_MAX_ROUNDS):
            has_moved = False
            for groups, keys in zip(self.sets, self.touched, strict=True):
                members = {group.name for group in groups}
                if not can_stretch(self.symmetry, members):
                    continue
                step = self._begin(keys)
                stretched = self._extend(step, self.closest.stretch(self.problem, step.after, members, keys)[0])
                before, after = (distance(each.after, self.problem.target, keys) for each in (step, stretched))
                if after < (1 - _GAIN) * before:
                    has_moved = True
                    self._take(stretched, keys)
            if not has_moved:
                break

    def _bases_of(self, groups: Iterable[Group]) -> list[Basis]:
        """The bases of some groups that are matrices."""
        members = {group.name for group in groups}
        return [basis for basis in self.bases.values() if basis.group in members]

    def _begin(self, keys: list[str]) -> _Step:
        """A step that changes nothing yet, with these tensors in memory unless they are too large for that."""
        current = self.current
        if current.is_lazy and sum(current.shapes[key].numel() for key in keys) <= _HELD_ENTRIES:
            current = StateDict({key: current[key] for key in keys})
        return _Step(self.total, current)

    def _extend(self, step: _Step, update: Transform) -> _Step:
        if update.is_identity:
            return step
        total = update @ step.total
        return _Step(total, self._transform(total) if step.after.is_lazy else step.after.map(update.move))

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

    def _measure_all(self) -> float:
        self._measure(self.current, [key for key in self.problem.keys if key not in self._distances])
        return sum(self._distances[key] for key in self.problem.keys)


class _Step(NamedTuple):
    """A transform that may be accepted, and the source after it, of which only some tensors may be there."""

    total: Transform
    after: State


def _rank(known: Known) -> float:
    """The number of directions in which a basis is known."""
    return sum(float(each.diagonal(dim1=-2, dim2=-1).sum()) for each in known)


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
