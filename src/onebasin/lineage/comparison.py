"""Two networks of one architecture, compared group by group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.engines.clock import spent_on
from onebasin.engines.work_meter import MEASURING
from onebasin.lineage.chance import combine
from onebasin.lineage.kinship import Evidence, compare_order, compare_residuals
from onebasin.lineage.layer_stacks import Stack
from onebasin.matching.closest_transforms import EQUAL
from onebasin.matching.copies import find_copy
from onebasin.matching.methods.basis_matching import sweep_transforms
from onebasin.matching.problem import Problem
from onebasin.matching.scores import touched_keys
from onebasin.symmetries import Group, Transform
from onebasin.tensors.comparison import is_mixed
from onebasin.tensors.states import State
from onebasin.tensors.sums import add_up, sum_pieces

TESTS = ("order", "residual")
"""Of which the p-value takes the better one."""
_MAX_SWEEPS = 10


class Comparison:
    """Both tests on every group, in the order in which groups are aligned.

    In that order each tensor is looked at once, when all but one of its groups have been aligned. So p-values of groups are
    independent under the null hypotheses, also those of the order test, for which nothing is aligned.

    Args:
        problem: B is the source, A the target.
        tolerance: of the residual test.
        stack: whose blocks were shifted, if any.
        shift: by how many.

    Attributes:
        evidence: of all groups.
        transform: of B; None if that is the identity, or nothing was looked for.
        changes: see `Provenance`.
        is_copy: whether B is A up to symmetry and rounding.
    """

    def __init__(self, problem: Problem, tolerance: float, stack: Stack | None, shift: int):
        self.problem, self.tolerance = problem, tolerance
        self.rename: Callable[[str], str] = (lambda key: key) if stack is None else (lambda key: stack.rename(key, shift))
        self.evidence: list[Evidence] = []
        self.transform: Transform | None = None
        self.changes: dict[str, float] = {}
        self.is_copy = False
        self.is_aligned = not problem.source.is_lazy
        self.generator = torch.Generator().manual_seed(problem.seed)

    def run(self, look_for_copy: bool) -> None:
        """Compare."""
        copied = find_copy(self.problem) if look_for_copy else None
        found = sweep_transforms(self.problem, 1, observe=self._observe).transform
        if copied is not None:
            self.is_aligned, found = True, Transform(copied, {})
        self.transform = None if found.is_identity else found
        if look_for_copy and self.is_aligned:
            self.changes = self._measure(self.transform)
            self.is_copy = self._is_same(self.transform)

    def _observe(self, groups: list[Group], keys: list[str], moved: State) -> bool:
        problem, symmetry = self.problem, self.problem.symmetry
        known = [group for group in groups if group.name in symmetry.groups]  # others are pairs of rotary embeddings
        if known and keys:
            found = compare_order(symmetry, known, keys, problem.target, problem.source, self.generator)
            if len(groups) == 1 and not groups[0].parents:
                found += self._compare_residuals(groups[0], keys, moved)
            self.evidence += [replace(each, other=self._rename(each.keys)) for each in found]
        return self.is_aligned or bool(set(touched_keys(symmetry, problem.keys, groups)) - set(keys))

    def _compare_residuals(self, group: Group, keys: list[str], moved: State) -> list[Evidence]:
        symmetry = self.problem.symmetry
        bases = [basis for basis in symmetry.bases.values() if basis.group == group.name]
        if any(basis.kind != "signed" for basis in bases):
            return []
        flipped = [key for basis in bases for key in basis.places]
        found = compare_residuals(symmetry, group, keys, self.problem.target, moved, self.generator, self.tolerance, flipped)
        return [] if found is None else [found]

    def _rename(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        renamed = tuple(self.rename(key) for key in keys)
        return () if renamed == keys else renamed

    def p_values(self) -> dict[str, float]:
        """Of each test."""
        return {test: combine([each.p_value for each in self.evidence if each.test == test]) for test in TESTS}

    def smallest_p_value(self) -> float:
        """That of the residual test if all units had agreed."""
        return combine([each.best for each in self.evidence if each.test == "residual"])

    def measure_derived(self, in_place: bool) -> None:
        """How much was changed, once the networks are known to be related."""
        candidates: list[Transform | None] = [None] if in_place else []
        if self.is_aligned:
            found = sweep_transforms(self.problem, _MAX_SWEEPS, self.transform).transform
            candidates.append(None if found.is_identity else found)
        measured = [(self._measure(each), each) for each in candidates]
        if measured:
            self.changes, self.transform = min(measured, key=lambda each: sum(each[0].values()))
            self.is_copy = self._is_same(self.transform)

    def _measure(self, transform: Transform | None) -> dict[str, float]:
        sizes = self._map_sizes(self._move(transform), self.problem.keys)
        return {key: _divide(*each) for key, each in zip(self.problem.keys, sizes, strict=True)}

    def _map_sizes(self, moved: State, keys: Sequence[str]) -> list[tuple[float, float]]:
        problem = self.problem
        with problem.held(), problem.engine.broadcast(moved):
            function = functools.partial(_measure_sizes, moved, problem.target)
            return list(problem.engine.map(function, keys, MEASURING, lambda key: problem.count_bytes([key])))

    def _is_same(self, transform: Transform | None) -> bool:
        """Whether parameters, and statistics of norms, are equal up to rounding."""
        moved, target = self._move(transform), self.problem.target
        buffers = [key for key, value in target.shapes.items() if is_mixed(value) and key not in self.problem.keys]
        for keys in (self.problem.keys, buffers):
            sums = [math.fsum(each) for each in zip(*self._map_sizes(moved, keys), strict=True)]
            if sums and _divide(*sums) ** 2 > EQUAL:
                return False
        return True

    def _move(self, transform: Transform | None) -> State:
        return self.problem.source if transform is None else self.problem.source.lazily().map(transform.move)


def _measure_sizes(state: State, target: State, key: str) -> tuple[float, float]:
    """The squared norm of the difference of two tensors, and that of the target's."""
    with spent_on("score"):
        own, value = state[key], target[key]
        return add_up(sum_pieces(_square_difference, own, value)), add_up(sum_pieces(_square_difference, value * 0, value))


def _square_difference(first: Tensor, other: Tensor) -> Tensor:
    return (first.double() - other.double()).square().sum()


def _divide(differences: float, squares: float) -> float:
    """The norm of a difference, relative to that of the target's."""
    return (differences / squares) ** 0.5 if squares else float(differences > 0)
