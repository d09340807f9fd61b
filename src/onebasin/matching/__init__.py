"""How to find a permutation: one method a file, all in one table."""

from collections.abc import Callable

from onebasin.matching.methods.activation_matching import match_activations
from onebasin.matching.methods.sinkhorn import match_by_sinkhorn
from onebasin.matching.methods.straight_through import match_straight_through
from onebasin.matching.methods.weight_matching import match_weights, polish
from onebasin.matching.problem import Found, Problem

METHODS: dict[str, Callable[..., Found]] = {
    "sinkhorn": match_by_sinkhorn,
    "weight-matching": match_weights,
    "activation-matching": match_activations,
    "ste": match_straight_through,
}

__all__ = ["METHODS", "Found", "Problem", "polish"]
