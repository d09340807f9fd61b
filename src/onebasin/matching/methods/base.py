"""What every method of finding a permutation offers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from onebasin.matching.problem import Problem
from onebasin.symmetries import Permutation


@dataclass(frozen=True)
class Match:
    """What a method found.

    Attributes:
        permutation: the best one.
        cost: its cost.
        converged: whether the method stopped by itself, not by its limit.
        alternatives: other permutations that sweeps of weight matching may lead to a better result.
        logits: where a descent on logits ended, with the moments of its optimiser, to go on from there.
    """

    permutation: Permutation
    cost: float
    converged: bool
    alternatives: tuple[Permutation, ...] = ()
    logits: dict[str, Tensor] | None = None


class Method(ABC):
    """A way to find a permutation; its fields are its options.

    Attributes:
        name: by which `align` knows it.
        looks_at_activations: whether it runs the networks, so that it needs modules and data whatever the objective is.
        reads_lazily: whether it reads tensors one at a time, so that lazy states need not be loaded.
        is_polished: whether sweeps of weight matching follow, if the objective uses no data.
    """

    name: ClassVar[str]
    looks_at_activations: ClassVar[bool] = False
    reads_lazily: ClassVar[bool] = False
    is_polished: ClassVar[bool] = False

    @property
    def resumes(self) -> bool:
        """Whether it goes on from an earlier result."""
        return False

    def check(self, problem: Problem) -> None:
        """Refuse a problem that it cannot solve, before any work is done.

        Raises:
            ValueError: saying why, and what to do.
        """
        return

    @abstractmethod
    def match(self, problem: Problem) -> Match:
        """Find a permutation; every entry of the history goes to ``problem.report``."""


def check_option(name: str, value: Any, at_least: float | None = None, above: float | None = None, below: float = math.inf):
    """Refuse a number outside its range; None stands for a default and is let through.

    Raises:
        ValueError: with the range.
    """
    if value is None:
        return
    fits = isinstance(value, int | float) and value < below
    if not fits or (at_least is not None and not value >= at_least) or (above is not None and not value > above):
        bounds = [f"at least {at_least:g}"] if at_least is not None else [f"above {above:g}"]
        bounds += [f"below {below:g}"] if below < math.inf else []
        raise ValueError(f"{name} must be a number {' and '.join(bounds)}, got {value!r}")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Refuse a word that is not one of the choices.

    Raises:
        ValueError: with the choices.
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
