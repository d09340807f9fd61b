"""What takes an adapter into the canonical form of its base, and out of that of another base.

Changes of basis need canonical forms, and an adapter belongs to a base as it was trained. So the gains of the old base are
folded into the adapter before it is moved as the base was, and those of the new base are taken out of it after that.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from onebasin.matching.canonical_form import canonical
from onebasin.symmetries import Transform


def find_folds(base: nn.Module, to: nn.Module, example_inputs: Any) -> tuple[Transform, Transform]:
    """For `move_adapter`, before and after the transform that aligns the canonical forms of two bases.

    Args:
        base: as the adapter was trained on it.
        to: as the adapter is to be loaded on it.
        example_inputs: to trace both with.

    Raises:
        ValueError: if a fold is more than positive scales.
    """
    folds = []
    for what, model in (("old", base), ("new", to)):
        fold = canonical(model, example_inputs).fold
        if fold is None:
            raise ValueError(
                f"a gain of the {what} base has entries below zero: to fold it is more than to scale units, and an adapter "
                "cannot follow. Take permutations alone, or merge the adapter into its base and port that"
            )
        folds.append(fold)
    return folds[0], folds[1].inverse()
