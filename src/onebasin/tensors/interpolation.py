"""Weighted sums of states: the points of a line, of a plane, and the average of models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebasin.tensors.comparison import check_alike, is_mixed
from onebasin.tensors.states import (
    LazyState,
    Model,
    RowReader,
    State,
    StateDict,
    check_ties,
    read_state,
    read_state_dict,
)


def interpolate(
    states: Sequence[Model], weights: Sequence[float], by_key: Mapping[str, Sequence[float]] | None = None
) -> State:
    """The weighted sum of the floating tensors of several states; everything else is the first one's.

    Sums are taken in float32 or wider and cast to the first state's dtype, on its device. A state of weight zero is not
    read, so that the end of a line is exactly the model that stands there. The weights need not sum to one.

    Args:
        states: modules or state dicts of one architecture; none is changed.
        weights: one number for each.
        by_key: other weights for tensors of these names.

    Returns:
        A new state. Keys that are one tensor in a state are one tensor here. If one of the states is lazy, so is the result:
        a tensor is mixed when it is read.

    Raises:
        ValueError: if keys, shapes or kinds of dtype differ (naming the first difference), or if a weight is not finite.

    >>> import torch
    >>> import onebasin as ob
    >>> ob.interpolate([{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 4.0])}], [0.75, 0.25])
    {'w': tensor([1.0000, 2.5000])}
    """
    weights = check_weights(weights, len(states))
    first, *others = read_alike(states)
    own = {key: check_weights(each, len(states)) for key, each in (by_key or {}).items()}
    if isinstance(first, LazyState):
        return LazyState(first.shapes, _Mixer([first, *(other.lazily() for other in others)], weights, own), first.device)
    return first.map(lambda key, value: _mix([value, *(other[key] for other in others)], own.get(key, weights)))


def check_weights(weights: Sequence[float] | None, count: int, normalise: bool = False) -> list[float]:
    """One finite weight for each of `count` models; equal ones if None.

    Args:
        weights: to be checked.
        count: the number of models.
        normalise: scale them to sum to one.

    Raises:
        ValueError: if there are too many or too few, a weight is not finite, or their sum is zero.
    """
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"there are {count} models and {len(weights)} weights; give one weight for each model")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite numbers, got {list(weights)}")
    total = float(sum(weights)) if normalise else 1.0
    if total == 0:
        raise ValueError(f"the weights must have a sum other than zero, got {list(weights)}")
    return [float(weight) / total for weight in weights]


def read_alike(models: Sequence[Model]) -> list[State]:
    """The states of several models of one architecture, with the same keys in the same order; all lazy if one is.

    Keys that are tied in one state are tied in each, and a state that omits a tied key gets it back.

    Raises:
        ValueError: naming the first difference to the first model.
    """
    if not models:
        raise ValueError("expected at least one model or state dict, got none")
    if any(isinstance(model, State) and model.is_lazy for model in models):
        states: list[State] = [read_state(model).lazily() for model in models]
        _check_all_alike(states)
        return states
    held = [read_state_dict(model) for model in models]
    ties = tuple(dict.fromkeys(keys for state in held for keys in state.ties))
    for state in held:
        check_ties(state, ties)
        for keys in ties:
            known = next((state[key] for key in keys if key in state), None)
            if known is not None:
                state.update(dict.fromkeys(keys, known))
    _check_all_alike(held)
    return [StateDict({key: state[key] for key in held[0]}) for state in held]


def _check_all_alike(states: Sequence[State]) -> None:
    for number, state in enumerate(states[1:], start=2):
        check_alike(states[0], state, "the first model", f"model {number}")


@dataclass(frozen=True)
class _Mixer(RowReader):
    """Weighted sums of lazy states; `own` are other weights for tensors of these names."""

    states: Sequence[LazyState]
    weights: Sequence[float]
    own: Mapping[str, Sequence[float]]

    def __call__(self, key: str) -> Tensor:
        return _mix([state[key] for state in self.states], self.own.get(key, self.weights))

    def has_rows(self, key: str) -> bool:
        return all(state.has_rows(key) for state in self.states)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return _mix([state.read_rows(key, start, stop) for state in self.states], self.own.get(key, self.weights))


def _mix(values: list[Tensor], weights: Sequence[float]) -> Any:
    first = values[0]
    if not is_mixed(first):
        return first.clone()
    dtype = torch.float32
    for value in values:  # narrow types promote to nothing wider than float32, and float8 does not promote at all
        dtype = torch.promote_types(dtype, value.dtype) if value.dtype.itemsize >= 4 else dtype
    total = torch.zeros_like(first, dtype=dtype)
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total.add_(value.to(total.device, dtype), alpha=weight)
    return total.to(first.dtype)
