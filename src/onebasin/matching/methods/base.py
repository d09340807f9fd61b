"""What every method of finding a permutation offers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
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
        logarithms: of the scales to begin with, for the permuted model.
        matrices: of the bases to begin with, likewise.
        whole_cost: the cost with these scales and matrices, if the method knows it.
    """

    permutation: Permutation
    cost: float
    converged: bool
    alternatives: tuple[Permutation, ...] = ()
    logits: dict[str, Tensor] | None = None
    logarithms: Mapping[str, Tensor] = field(default_factory=dict)
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    whole_cost: float | None = None


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
    def title(self) -> str:
        """The name, with what tells it from the same method with other options."""
        return self.name

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


def check_number(
    name: str,
    value: Any,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> None:
    """Refuse what is no number, or one outside its range.

    Raises:
        ValueError: with the range.
    """
    _check_range(name, value, Real, "a number", at_least, above, below, optional)


def check_count(name: str, value: Any, at_least: float = -math.inf, optional: bool = False) -> None:
    """Refuse what is no whole number, or too small a one.

    Raises:
        ValueError: with the smallest.
    """
    _check_range(name, value, Integral, "a whole number", at_least, -math.inf, math.inf, optional)


def _check_range(
    name: str, value: Any, kind: type, what: str, at_least: float, above: float, below: float, optional: bool
) -> None:
    if optional and value is None:
        return
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if fits and at_least <= value < below and value > above:
        return
    limits = {"of at least": at_least, "above": above, "below": below}
    bounds = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
    expected = f"{what} {bounds}".strip() + (" or None" if optional else "")
    raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_flag(name: str, value: Any, optional: bool = False) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ValueError: saying so.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        raise ValueError(f"{name} must be {'True, False or None' if optional else 'True or False'}, got {value!r}")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Refuse a word that is not one of the choices.

    Raises:
        ValueError: with the choices.
    """
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
