"""The default with an objective, and what it would be with a descent less: activation matching, descents, exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import onebasin as ob
from onebasin.matching.methods import Method
from onebasin.matching.recommendation import SHARP

SOFT, EXCHANGES = ob.Sinkhorn(), ob.Exchange(rounds=2)
SHORTER: dict[str, tuple[Method, ...]] = {
    "without the sharp descent": (ob.ActivationMatching(), SOFT, EXCHANGES),
    "without the soft descent": (ob.ActivationMatching(), SHARP, EXCHANGES),
}


def align_in_turn(model: nn.Module, to: nn.Module, methods: Sequence[Method], **arguments: Any) -> ob.Alignment[Any]:
    """By each method from what the one before it found, as the default does."""
    found = ob.align(model, to=to, method=methods[0], **arguments)
    for method in methods[1:]:
        found = ob.align(model, to=to, method=method, init=found.permutation, **arguments)
    return found
