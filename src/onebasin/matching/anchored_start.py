"""A transform to begin with: every set of groups is decided once, by tensors whose other groups have been decided.

Inputs and outputs of a network have an order of their own. From there on, one set of groups after the other is judged by
what can be compared with the target already: so a network that is a transformed copy of the target is found exactly.

A step is not refused if it raises the distance of all tensors. It is judged by tensors whose other groups have been decided;
tensors whose other groups have not may move away, even if the step is right. For example, if the units of the next group
have all changed their signs, the right order of these units makes the tensor between the two groups the exact opposite of
the target's. The caller compares the distances before and after all steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.matching.closest_matrices import Known
from onebasin.matching.closest_transforms import EXACT, WORST_CONDITION, ClosestTransforms, distance
from onebasin.matching.joint_matrices import solve_together
from onebasin.matching.problem import Problem
from onebasin.matching.scores import has_siblings, has_twins, order_from_anchors, touched_keys
from onebasin.matching.transform_steps import Step, TransformSteps
from onebasin.matching.unit_pairs import UnitPairs
from onebasin.symmetries import Basis, Group, Symmetry, Transform
from onebasin.symmetries.basis_matrices import MixedTensors, pair
from onebasin.symmetries.layout import names
from onebasin.tensors.states import State

_EXPLAINED = 0.5
"""The share of the squares of a tensor that a scale or a matrix may leave to be taken before all its tensors are known."""
_JOINT_ENTRIES = 10**6
"""Of the tensors of bases that are solved together, by many passes over them."""

Observe = Callable[[list[Group], list[str], State], bool]
"""Called before each set of groups is decided, with the set, the tensors it is judged by, all of them beside groups that
have been decided, and the source as it is transformed by then. Returns whether to decide the set."""


def order_sets(problem: Problem, sets: list[list[Group]]) -> list[tuple[list[Group], list[str]]]:
    """Sets of groups in the order to decide them, each with the tensors that it changes."""
    touched = [touched_keys(problem.symmetry, problem.keys, groups) for groups in sets]
    telling = [[key for key in keys if _tells_apart(problem, key)] for keys in touched]
    return [(sets[place], touched[place]) for place in order_from_anchors(problem.symmetry, sets, telling)]


def _tells_apart(problem: Problem, key: str) -> bool:
    """Whether a tensor has several numbers for each unit: a bias has one, which is any other one's multiple."""
    shape = problem.target.shapes[key].shape
    return shape.numel() > max(shape, default=1)


class AnchoredStart:
    """Decides sets of groups one after the other. The distance of all tensors may rise on the way: compare it at the end.

    A group is judged by the tensors whose other groups have been decided, where there are any: of grouped queries, key-value
    heads and their units by keys and values, then query heads by queries and outputs. Scales and matrices are chosen too if
    they explain most of these tensors. Where the tensors do not span a basis it is known in part: the groups beside it are
    judged by that part alone, and it is solved again as more tensors can be compared.

    Args:
        steps: the transform so far, which is changed.
        closest: its scales and matrices.
        pairs: chooses which units belong together.
        sets: of groups that are decided together, with the tensors that they change: see `order_sets`.
        is_stretched: whether to choose scales and invertible matrices, not permutations and rotations alone.
        observe: see `Observe`.

    Attributes:
        decided: the groups that have been decided.
        known: of bases that the tensors compared so far do not span, the directions in which they are known.
        unknown: the scales of decided groups that enter none of the tensors compared so far.
    """

    def __init__(
        self,
        steps: TransformSteps,
        closest: ClosestTransforms,
        pairs: UnitPairs,
        sets: list[tuple[list[Group], list[str]]],
        is_stretched: bool = True,
        observe: Observe | None = None,
    ):
        self.steps, self.closest, self.pairs, self.sets, self.observe = steps, closest, pairs, sets, observe
        self.problem, self.symmetry, self.is_stretched = steps.problem, steps.problem.symmetry, is_stretched
        self.decided = self.symmetry.groups.keys() - {group.name for groups, _ in sets for group in groups}
        self.known: dict[str, Known] = {}
        self.unknown: set[str] = set()

    def build(self) -> int:
        """Decide all sets.

        Returns:
            The number of sets that were decided, and not left as they are by `observe`.
        """
        num_decided, left = 0, list(self.sets)
        while left:
            self.problem.progress("sweep 1", len(self.sets) - len(left), len(self.sets))
            groups, keys = left.pop(self._choose(left))
            num_decided += self._decide(groups, keys)
        self._solve_together([name for name in self.known if self.symmetry.bases[name].kind == "linear"])
        return num_decided

    def _choose(self, left: list[tuple[list[Group], list[str]]]) -> int:
        """The place of the next set: while some basis is known in part, units that are only permuted come first."""
        for place, (groups, keys) in enumerate(left if self.known else ()):
            trusted = self._trusted(keys, {group.name for group in groups})
            if not self.pairs.bases_of(groups) and any(_tells_apart(self.problem, key) for key in trusted):
                return place
        return 0

    def _decide(self, groups: list[Group], keys: list[str]) -> bool:
        """Decide a set, and what can be told from it about those that have been decided.

        Returns:
            Whether it was decided.
        """
        members = {group.name for group in groups}
        beside = self._beside(keys, members)
        step = self.steps.begin(beside or keys)
        if self.observe is not None and not self.observe(groups, beside, step.after):
            self.decided |= members
            return False
        judged = self._trusted(keys, members) or beside or keys
        for chosen, telling in _stages(self.symmetry, groups, judged):
            step = self._settle(step, chosen, telling)
        self.steps.take(step, keys)
        self.decided |= members
        if self.is_stretched:
            scales = [scale for scale in self.symmetry.scales.values() if scale.group in members]
            self.unknown |= {scale.name for scale in scales if scale.powers.keys().isdisjoint(judged)}
            self._scale_again()
        self._learn_more(members)
        if self.observe is not None:
            self._turn_again()
        return True

    def _beside(self, keys: Iterable[str], members: Collection[str] = ()) -> list[str]:
        """The tensors on which no groups but these are left to decide."""
        symmetry, decided = self.symmetry, self.decided.union(members)
        return [key for key in keys if names(symmetry.layouts[key]) & symmetry.groups.keys() <= decided]

    def _trusted(self, keys: Iterable[str], members: Collection[str] = ()) -> list[str]:
        """The same, without tensors that scales of other groups enter which are not known."""
        unknown = (self.symmetry.scales[name] for name in self.unknown)
        scaled = {key for scale in unknown if scale.group not in members for key in scale.powers}
        return [key for key in self._beside(keys, members) if key not in scaled]

    def _settle(self, step: Step, groups: list[Group], keys: list[str]) -> Step:
        """Permute, rotate and stretch some groups by tensors whose other groups have been decided.

        Units are paired by their best scales and matrices, and as they are: what ends closer is taken. Tensors that have a
        group on several axes count after it has been decided by the others.
        """
        members = {group.name: group for group in groups}
        once = [key for key in keys if not has_twins(self.symmetry, key, members)] or keys
        view = self._see(members)
        problem = replace(self.problem, target=view(self.problem.target))
        found, known = step, {}
        if self.is_stretched and self.pairs.can_fit(groups):
            enough = EXACT * sum(float(problem.target[key].square().sum()) for key in once)
            closest = float("inf")
            for fitted in (True, False):
                candidate, seen = self._fit(problem, step, groups, once, fitted)
                left = distance(view(candidate.after), problem.target, once)
                if left < closest:
                    found, known, closest = candidate, seen, left
                if left <= enough:
                    break
        else:
            found, known = self._fit(problem, step, groups, once, fitted=False)
        self.known |= known
        if once != keys and not known:
            turned = self._turn(problem, found, groups, keys)
            before, after = (distance(view(each.after), problem.target, keys) for each in (found, turned))
            found = turned if after < before else found
        return found

    def _fit(
        self, problem: Problem, step: Step, groups: list[Group], keys: list[str], fitted: bool
    ) -> tuple[Step, dict[str, Known]]:
        """A step that permutes, rotates and stretches, and the directions in which bases are known after it."""
        members = {group.name for group in groups}
        view = self._see(members)
        step = self.steps.extend(step, self.pairs.find(problem, view(step.after), groups, keys, fitted))
        update, turned = self.closest.rotate(problem, view(step.after), self.pairs.bases_of(groups), keys)
        step = self.steps.extend(step, update)
        known = {name: each for name, each in turned.items() if self.symmetry.bases[name].kind != "linear"}
        if not self.is_stretched:
            return step, known
        update, stretched = self.closest.stretch(problem, view(step.after), members, keys, _EXPLAINED)
        return self.steps.extend(step, update), known | stretched

    def _turn(self, problem: Problem, step: Step, groups: list[Group], keys: list[str]) -> Step:
        """A step that permutes some groups as they are, and rotates them."""
        view = self._see({group.name for group in groups})
        step = self.steps.extend(step, self.pairs.find(problem, view(step.after), groups, keys, fitted=False))
        return self.steps.extend(step, self.closest.rotate(problem, view(step.after), self.pairs.bases_of(groups), keys)[0])

    def _see(self, members: Collection[str]) -> Callable[[State], State]:
        """Makes a state in which bases of other groups have only the directions in which they are known."""
        plans: dict[str, Tensor] = {}
        for name, known in self.known.items():
            if self.symmetry.bases[name].group not in members:
                plans |= {each: plan.to(self.problem.device) for each, plan in pair(name, *known).items()}

        project = functools.partial(_project, self.closest.mixed, plans)  # workers of an engine can be given it
        return (lambda state: state.map(project)) if plans else (lambda state: state)

    def _scale_again(self) -> None:
        """Choose scales that are not known by tensors whose groups have been decided by now."""
        for name in sorted(self.unknown):
            scale = self.symmetry.scales[name]
            touched = [key for key in self.problem.keys if key in scale.powers]
            if keys := self._trusted(touched, {scale.group}):
                step, view = self.steps.begin(keys), self._see({scale.group})
                problem = replace(self.problem, target=view(self.problem.target))
                update, _ = self.closest.stretch(problem, view(step.after), {scale.group}, keys, _EXPLAINED)
                self.steps.take(self.steps.extend(step, update), touched)
                self.unknown.discard(name)

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

    def _tells_more(self, key: str, basis: Basis, changed: Collection[str]) -> bool:
        """Whether what is new about some groups tells more about a basis, in a tensor."""
        others = names(self.symmetry.layouts[key]) - {basis.group}
        is_both = len({place.is_dual for place in basis.places[key]}) > 1
        return bool(others & set(changed)) or (is_both and basis.group in changed)

    def _solve_again(self, basis: Basis, keys: list[str]) -> bool:
        """Solve a basis that is known in part.

        Returns:
            Whether more of it is known than before.
        """
        known, view, step = self.known[basis.name], self._see({basis.group}), self.steps.begin(keys)
        problem, current = replace(self.problem, target=view(self.problem.target)), view(step.after)
        if basis.kind == "linear":
            update, found = self.closest.stretch(problem, current, {basis.group}, keys, _EXPLAINED)
        else:
            update, found = self.closest.rotate(problem, current, [basis], keys, {basis.name: known})
        now = found.get(basis.name)
        if now is not None and now.rank < known.rank + 0.5:
            return False
        del self.known[basis.name]
        if now is not None:
            self.known[basis.name] = now
        self.steps.take(self.steps.extend(step, update), [key for key in self.problem.keys if key in basis.places])
        return True

    def _solve_together(self, bases: list[str]) -> None:
        """Solve bases that are known in part after all groups have been decided: they are beside each other."""
        keys = [key for key in self.problem.keys if any(key in self.symmetry.bases[name].places for name in bases)]
        if len(bases) < 2 or sum(self.problem.target.shapes[key].numel() for key in keys) > _JOINT_ENTRIES:
            return
        step = self.steps.begin(keys)
        source, target = ({key: state[key].double() for key in keys} for state in (step.after, self.problem.target))
        if distance(source, target, keys) <= EXACT * sum(float(value.square().sum()) for value in target.values()):
            return
        found = solve_together(self.symmetry, self.closest.mixed, source, target, bases)
        if max(float(torch.linalg.cond(matrix).max()) for matrix in found.values()) < WORST_CONDITION:
            after = self.steps.extend(step, Transform(self.symmetry.identity(), {}, found, check=False))
            self.steps.take_if_closer(step, after, keys)

    def _turn_again(self) -> None:
        """Rotate groups that have been decided once more, by all the tensors whose groups have been decided by now."""
        for groups, touched in self.sets:
            bases = [basis for basis in self.pairs.bases_of(groups) if basis.kind in ("orthogonal", "centred")]
            keys = self._trusted(touched)
            if bases and {group.name for group in groups} <= self.decided and not self.steps.current.is_lazy:
                before = self.steps.begin(keys)
                update, _ = self.closest.rotate(self.problem, before.after, bases, keys)
                self.steps.take_if_closer(before, self.steps.extend(before, update), keys)


def _project(mixed: MixedTensors, plans: Mapping[str, Tensor], key: str, value: Tensor) -> Tensor:
    return mixed.mix_with({key: value}, plans).get(key, value)


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
