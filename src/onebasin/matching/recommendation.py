"""Which method to take when the user names none; docs/alignment.md has the measurements behind it."""

from __future__ import annotations

import math
from typing import NamedTuple

from onebasin.matching.methods import ActivationMatching, Method, Sinkhorn, WeightMatching
from onebasin.matching.methods.sinkhorn import available_memory, plan_memory
from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import factors
from onebasin.tensors.states import State

AUTO = "auto"
"""The default method of `align`, `merge` and the command."""
_MOST_FLOPS = {"cpu": 1e13, "cuda": 1e15}
"""A descent that computes more than this would take more than minutes."""


class Recommendation(NamedTuple):
    """A method, and why it was chosen."""

    method: Method
    reason: str


def recommend(symmetry: Symmetry, source: State, target: State, has_data: bool) -> Recommendation:
    """The method for a problem whose objective the user has not named.

    Args:
        symmetry: its groups are to be decided.
        source: the model to permute.
        target: the model to align it to.
        has_data: whether there are modules to run, and data.
    """
    if has_data:
        return Recommendation(ActivationMatching(), "there is data, and no objective was named")
    available = available_memory(target.device)
    needed = plan_memory(symmetry, target.dtype) + 2 * source.num_bytes + 2 * target.num_bytes
    if available is not None and needed > available / 2:
        return Recommendation(WeightMatching(), "a descent would need more than half of the memory that is free")
    if Sinkhorn().steps * _flops_per_step(symmetry) > _MOST_FLOPS.get(target.device.type, 1e13):
        return Recommendation(WeightMatching(), "a descent would take too long for networks of this size")
    return Recommendation(Sinkhorn(), "without data it is the best method for networks of this size")


def _flops_per_step(symmetry: Symmetry) -> float:
    """Floating-point operations per step of a descent on WeightDistance: five products per tensor with its groups' plans."""
    total = 0.0
    for layout in symmetry.layouts.values():
        widths = [f.size for term in layout for f in factors(term) if f.name in symmetry.groups]
        total += 5 * math.prod(term.size for term in layout) * sum(widths)
    return total
