"""The transform of a source so far, and steps that change it: of lazy states, a few tensors are in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from onebasin.matching.closest_transforms import EXACT, distance
from onebasin.matching.problem import Problem
from onebasin.symmetries import Transform
from onebasin.tensors.states import State, StateDict

_HELD_ENTRIES = 10**8
"""Of the tensors of a lazy source that are held for a step. More than that are read, and transformed, each time anew."""


class Step(NamedTuple):
    """A transform that may be accepted, and the source after it, of which only some tensors may be there."""

    total: Transform
    after: State


class TransformSteps:
    """A transform that is built up by steps.

    Args:
        problem: with source and target.
        start: what to begin with.

    Attributes:
        problem: the same.
        total: the transform.
        current: the source, transformed.
    """

    def __init__(self, problem: Problem, start: Transform):
        self.problem, self.total = problem, start
        self.current = start.apply(problem.source)
        self._distances: dict[str, float] = {}  # of tensors that have not changed since they were last in memory

    def begin(self, keys: list[str]) -> Step:
        """A step that changes nothing yet, with these tensors in memory unless they are too large for that."""
        current = self.current
        if current.is_lazy and sum(current.shapes[key].numel() for key in keys) <= _HELD_ENTRIES:
            current = StateDict({key: current[key] for key in keys})
        return Step(self.total, current)

    def extend(self, step: Step, update: Transform) -> Step:
        """A step with another transform after it."""
        if update.is_identity:
            return step
        total = update @ step.total
        return Step(total, self._transform(total) if step.after.is_lazy else step.after.map(update.move))

    def take(self, step: Step, keys: Iterable[str]) -> None:
        """Accept a step that changes some tensors."""
        for key in keys:
            self._distances.pop(key, None)
        if self.current.is_lazy and not step.after.is_lazy:
            self._measure(step.after, step.after)
        if step.total is not self.total:
            self.current = self._transform(step.total) if self.current.is_lazy else step.after
            self.total = step.total

    def take_if_closer(self, before: Step, after: Step, keys: list[str], gain: float = 0.0) -> bool:
        """Accept a step if it brings some tensors, all that it changes, closer by more than a share of their distance."""
        left, found = (distance(step.after, self.problem.target, keys) for step in (before, after))
        if not found < (1 - gain) * left:
            return False
        self.take(after, keys)
        return True

    def go_back(self, start: Step) -> None:
        """Undo all steps since one that held all tensors of the state."""
        self.total, self.current, self._distances = start.total, start.after, {}

    def measure(self) -> float:
        """The squared distance of all parameters."""
        self._measure(self.current, [key for key in self.problem.keys if key not in self._distances])
        return sum(self._distances[key] for key in self.problem.keys)

    @property
    def is_equal(self) -> bool:
        """Whether the source is the target now, up to rounding."""
        return self.measure() <= EXACT * self._squares

    @functools.cached_property
    def _squares(self) -> float:
        return sum(float(self.problem.target[key].square().sum(dtype=torch.float64)) for key in self.problem.keys)

    def _transform(self, total: Transform) -> State:
        return self.problem.source.map(total.move)

    def _measure(self, state: State, keys: Iterable[str]) -> None:
        self._distances |= {key: distance(state, self.problem.target, [key]) for key in keys}
