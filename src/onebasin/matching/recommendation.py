"""Which methods to take when the user names none; docs/alignment.md has the measurements behind it."""

from __future__ import annotations

import math
from typing import NamedTuple

from onebasin.engines.memory_limits import available_memory
from onebasin.matching.methods import ActivationMatching, Exchange, Method, Sinkhorn, WeightMatching
from onebasin.matching.methods.sinkhorn import plan_memory
from onebasin.matching.methods.staying import Staying
from onebasin.relaxation.objectives import Objective, WeightDistance
from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import factors
from onebasin.tensors.states import State

AUTO = "auto"
"""The default method of `align`, `merge` and the command."""
SHARP = Sinkhorn(start="scaled", mass=0.999, lr=0.4)
"""A descent for deep networks: from the identity of the paper their soft network passes hardly any signal."""
_MOST_FLOPS = {"cpu": 1e13, "cuda": 1e15}
"""A descent that computes more than this would take more than minutes."""


class Recommendation(NamedTuple):
    """Methods, each started from what the one before it found, and why they were chosen."""

    methods: tuple[Method, ...]
    reason: str

    def __str__(self) -> str:
        names = ", then ".join(method.title for method in self.methods)
        return f"{names} {'was' if len(self.methods) == 1 else 'were'} chosen: {self.reason}."


def recommend(
    symmetry: Symmetry, source: State, target: State, goal: Objective | None, has_data: bool, is_started: bool
) -> Recommendation:
    """The methods for a problem whose method the user has not named.

    Args:
        symmetry: its groups are to be decided.
        source: the model to permute.
        target: the model to align it to.
        goal: what to minimise, if the user has named that.
        has_data: whether there are modules to run, and data.
        is_started: whether the user gave something to start from.
    """
    is_distance = isinstance(goal, WeightDistance) and goal.kind == "l2" and (symmetry.bases or symmetry.scales)
    if is_distance:
        return _match_weights(symmetry)
    if goal is not None and not (goal.uses_data and has_data):
        return Recommendation((Sinkhorn(),), "it minimises any objective")
    obstacle = _find_obstacle(symmetry, source, target)
    if goal is not None:
        first = () if is_started else (ActivationMatching(),)
        if symmetry.scales or any(basis.kind != "signed" for basis in symmetry.bases.values()):
            return Recommendation(first or (Staying(),), "scales and bases are learned best from there")
        descents = () if obstacle else (Sinkhorn(), SHARP)
        return Recommendation(
            (*first, *descents, Exchange(rounds=2)), "each lowers the objective further, or changes nothing"
        )
    if has_data:
        return Recommendation((ActivationMatching(),), "there is data, and no objective was named")
    if symmetry.bases or symmetry.scales:
        return _match_weights(symmetry)
    if obstacle:
        return Recommendation((WeightMatching(),), obstacle)
    return Recommendation((Sinkhorn(),), "without data its distance of the weights is at most that of weight matching")


def _match_weights(symmetry: Symmetry) -> Recommendation:
    done = "rotates units" if symmetry.bases else "finds scales with the permutations"
    return Recommendation((WeightMatching(),), f"without data it is the one that {done}")


def _find_obstacle(symmetry: Symmetry, source: State, target: State) -> str:
    """Why a descent on soft permutations is out of reach; empty if it is not."""
    available = available_memory(target.device)
    needed = plan_memory(symmetry, target.dtype) + 2 * source.num_bytes + 2 * target.num_bytes
    if available is not None and needed > available / 2:
        return "a descent would need more than half of the memory that is free"
    if Sinkhorn().steps * _flops_per_step(symmetry) > _MOST_FLOPS.get(target.device.type, 1e13):
        return "a descent would take too long for networks of this size"
    return ""


def _flops_per_step(symmetry: Symmetry) -> float:
    """Floating-point operations per step of a descent on WeightDistance: five products per tensor with its groups' plans."""
    total = 0.0
    for layout in symmetry.layouts.values():
        widths = [f.size for term in layout for f in factors(term) if f.name in symmetry.groups]
        total += 5 * math.prod(term.size for term in layout) * sum(widths)
    return total
