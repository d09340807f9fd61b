"""The search behind `align`: a copy, or the best of several attempts by a method, and what is learned from there."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from onebasin.matching.copies import find_copy
from onebasin.matching.methods import Match, Method
from onebasin.matching.methods.weight_matching import sweep_all
from onebasin.matching.problem import Problem
from onebasin.matching.scaling import Learned, Scaling, learn_transform
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.seeding import seeded

COPY_DETECTION = "copy detection"
"""The method of an alignment whose model is a permuted copy of the target."""


@dataclass(frozen=True)
class Found:
    """Where a search ended.

    Attributes:
        start: where it started, of all groups.
        problem: with the source moved there.
        match: what was found from there, of the groups to decide.
    """

    start: Permutation | Transform
    problem: Problem
    match: Match

    @property
    def cost(self) -> float:
        """Of the match, with its scales and matrices if these lower it."""
        return min(self.match.cost, self._whole_cost)

    @functools.cached_property
    def _whole_cost(self) -> float:
        """Of the match, with its scales and matrices."""
        match = self.match
        if not (match.logarithms or match.matrices):
            return match.cost
        if match.whole_cost is not None:
            return match.whole_cost
        whole = Transform(match.permutation, match.logarithms, match.matrices, check=False)
        return self.problem.cost_of(whole.apply(self.problem.source))

    def learn(self, options: Scaling) -> Learned:
        """The scales and bases that cost least after the permutation of the match: its own, learned ones, or none."""
        symmetry = self.problem.symmetry
        if not (symmetry.scales or symmetry.bases):
            return Learned({}, {}, self.match.cost)
        moved = self.problem.starting_from(self.match.permutation)
        start = Transform(symmetry.identity(), self.match.logarithms, self.match.matrices)
        return learn_transform(moved.reporting_as("scales"), options, start, (self.match.cost, self._whole_cost))

    def compose(self, learned: Learned) -> Permutation | Transform:
        """All that was done to the source of the search: start, permutation, scales and bases."""
        permutation = _embed(self.start.symmetry, self.match.permutation)
        if isinstance(self.start, Permutation) and not (learned.logarithms or learned.matrices):
            return permutation @ self.start
        start = self.start if isinstance(self.start, Transform) else Transform(self.start, {})
        return Transform(permutation, learned.logarithms, learned.matrices) @ start

    def compose_target(self, learned: Learned) -> Transform | None:
        """What is done to the target; None if it stays as it is."""
        return None if learned.of_target is None else Transform(self.start.symmetry.identity(), *learned.of_target)


@dataclass(frozen=True)
class Outcome:
    """What a search by one or more methods came to.

    Attributes:
        found: where the last of them ended.
        learned: the scales and bases that follow.
        method: the names of the methods.
        notes: what each did beyond the first, in sentences.
    """

    found: Found
    learned: Learned
    method: str
    notes: tuple[str, ...]

    @property
    def is_copy(self) -> bool:
        """Whether the model is a permuted copy of the target."""
        return self.method == COPY_DETECTION


@dataclass(frozen=True)
class Search:
    """A copy, or the best of several attempts by a method.

    Attributes:
        problem: of the groups to decide.
        symmetry: with all groups.
        method: by which to search.
        polish: see `onebasin.align`.
    """

    problem: Problem
    symmetry: Symmetry
    method: Method
    polish: bool | None

    def run(
        self,
        start: Permutation | Transform | Method | None,
        later: Sequence[Method],
        restarts: int,
        scaling: Scaling | None,
        detect_copy: bool,
        most: float = math.inf,
    ) -> Outcome:
        """Detect a copy; or else search, go on from there by later methods, and learn scales and bases.

        The arguments are those of `onebasin.align`; each of the later methods starts from what was found before it. If the
        end of it all costs more than `most`, nothing is permuted, and scales and bases are learned of the model as given.
        """
        found = self.find_copy() if detect_copy and not self.method.resumes else None
        if found is not None:
            note = "The model is a permuted copy of the target: no method was run."
            return Outcome(found, Learned({}, {}, found.cost), COPY_DETECTION, (note,))
        by, found, notes = self.method.name, self.find(start, restarts), []
        for each in later:
            before = found
            found = replace(self, method=each).find(before.compose(before.learn(Scaling(steps=0))), restarts=0)
            by += f", {each.title}"
            notes += [f"{each.title} {_describe_change(before.cost, found.cost)}."]
        symmetry = self.problem.symmetry
        options = scaling or Scaling(steps=0 if self.problem.source.is_lazy else Scaling.steps)
        learned = found.learn(options)
        what = " and ".join(["Positive scales"] * bool(symmetry.scales) + ["Changes of basis"] * bool(symmetry.bases))
        if what:
            notes += [f"{what.capitalize()} {_describe_change(found.match.cost, learned.cost)}."]
        if learned.cost > most:
            found = Found(self.symmetry.identity(), self.problem, Match(symmetry.identity(), most, converged=True))
            learned = found.learn(options)
            notes += ["No units were permuted: the model as it was given costs less."]
        return Outcome(found, learned, by, tuple(notes))

    def find_copy(self) -> Found | None:
        """The permutation that makes both models equal, if there is one and the objective uses no data."""
        problem = self.problem
        if problem.objective.uses_data or not problem.symmetry.groups or (copied := find_copy(problem)) is None:
            return None
        cost = problem.cost_of_copy(copied)
        problem.report({"step": 0, "hard": cost, "best": cost, "by": COPY_DETECTION})
        return Found(self.symmetry.identity(), problem, Match(copied, cost, converged=True))

    def find(self, init: Permutation | Transform | Method | None, restarts: int) -> Found:
        """The best of what the method finds from the start, and from random permutations after it."""
        problem, identity = self.problem, self.problem.symmetry.identity()
        if not problem.symmetry.groups:
            start = self.symmetry.identity() if init is None or isinstance(init, Method) else init
            moved = problem.starting_from(start)
            return Found(start, moved, Match(identity, moved.cost(identity), converged=True))
        self.method.check(problem)
        best: Found | None = None
        for attempt, start in enumerate(self._starts(init, restarts)):
            is_started = attempt == 0 and isinstance(start, Transform) and not start.is_permutation
            moved = replace(problem.starting_from(start), seed=problem.seed + attempt, is_started=is_started)
            with seeded(moved.seed, problem.device):
                found = Found(start, moved, self._solve(moved, self.method))
            if attempt == 0 and init is not None and found.cost > (cost := moved.cost(identity)):
                # A method that looks at something else than the objective may end higher: then the start is the answer.
                match = replace(found.match, permutation=identity, cost=cost, logarithms={}, matrices={})
                found = replace(found, match=match)
            if best is None or found.cost < best.cost:
                best = found
            if restarts and found.cost <= problem.objective.floor:
                break
        assert best is not None
        return best

    def _starts(self, init: Permutation | Transform | Method | None, restarts: int) -> Iterator[Permutation | Transform]:
        first = self.symmetry.identity() if init is None else init
        if isinstance(first, Method):
            found = Found(self.symmetry.identity(), self.problem, self._solve(self.problem, first))
            first = found.compose(found.learn(Scaling(steps=0)))
        yield first
        generator = torch.Generator().manual_seed(self.problem.seed)
        for _ in range(restarts):
            drawn = _embed(self.symmetry, self.problem.symmetry.random(generator))
            yield drawn @ first if isinstance(first, Permutation) else Transform(drawn, {}) @ first

    def _solve(self, problem: Problem, method: Method) -> Match:
        """What a method finds, polished if that is wanted."""
        found = method.match(problem.reporting_as(method.name))
        wanted = method.is_polished and not problem.objective.uses_data if self.polish is None else self.polish
        if not wanted or found.cost <= problem.objective.floor:
            return found
        # The sweeps from the identity are weight matching by default: the result costs no more than it.
        starts = (found.permutation, *found.alternatives, problem.symmetry.identity())
        for permutation in sweep_all(problem.reporting_as("polish"), starts):
            cost = problem.cost(permutation)
            if cost < found.cost:
                found = replace(found, permutation=permutation, cost=cost)
            problem.report({"polish": cost, "best": found.cost, "by": "polish"})
        return found


def _describe_change(before: float, after: float) -> str:
    return f"lowered the cost from {before:.6g} to {after:.6g}" if after < before else f"left the cost at {after:.6g}"


def _embed(symmetry: Symmetry, permutation: Permutation) -> Permutation:
    """A permutation of some groups as one of all groups."""
    return Permutation(symmetry, {**symmetry.identity_indices, **permutation.indices}, check=False)
