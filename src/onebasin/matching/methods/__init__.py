"""How to find a permutation: one method per file, all in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypedDict

from torch import Tensor

from onebasin.matching.methods.activation_matching import ActivationMatching
from onebasin.matching.methods.base import Match, Method
from onebasin.matching.methods.exchange import Exchange
from onebasin.matching.methods.sinkhorn import Sinkhorn
from onebasin.matching.methods.straight_through import StraightThrough
from onebasin.matching.methods.weight_matching import WeightMatching

__all__ = [
    "METHODS",
    "ActivationMatching",
    "Exchange",
    "Match",
    "Method",
    "MethodName",
    "MethodOptions",
    "Sinkhorn",
    "StraightThrough",
    "WeightMatching",
    "make_method",
]

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Sinkhorn, WeightMatching, ActivationMatching, StraightThrough, Exchange)
}
MethodName = Literal["sinkhorn", "weight-matching", "activation-matching", "ste", "exchange"]


class MethodOptions(TypedDict, total=False):
    """The options of all methods, for keyword arguments; each method's own are the fields of its class."""

    steps: int
    lr: float | None
    optimizer: Literal["adam", "row-adam"] | None
    tau: float
    final_tau: float | None
    num_iters: int
    gradient: Literal["implicit", "unrolled"]
    patience: int
    check_every: int | None
    start: Literal["identity", "scaled", "random"]
    mass: float
    noise: float
    logits: dict[str, Tensor] | None
    solver_steps: int
    capture: bool | None
    max_sweeps: int
    order: Literal["anchored", "random"]
    num_batches: int | None
    rounds: int
    candidates: float
    damping: float
    num_gradient: int
    num_trial: int
    num_confirm: int
    max_seconds: float | None


def make_method(method: str | Method, options: Mapping[str, Any]) -> Method:
    """A method by its name and options, or as it is.

    Raises:
        ValueError: if there is no such method, or an option has no such value.
        TypeError: if it has no such option.
    """
    if isinstance(method, Method):
        if options:
            raise TypeError(f"{next(iter(options))!r} is an option: give it to {type(method).__name__}(...)")
        return method
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of 'auto', {', '.join(map(repr, METHODS))}, got {method!r}")
    known = [field.name for field in fields(METHODS[method])]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise TypeError(f"{method!r} has no option {name!r}; it has {', '.join(known)}")
    return METHODS[method](**options)
