"""Weighted sums of states: the points of a line, of a plane, and of an average of models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.tensors.lazy import LazyState, make_lazy
from onebasin.tensors.states import State, check_ties, read_state


def interpolate(states: Sequence[nn.Module | Mapping[str, Any]], weights: Sequence[float]) -> State | LazyState:
    """The weighted sum of the floating tensors of several states; everything else is the first one's.

    Sums are taken in float32 or wider and cast to the first state's dtype, on its device. A state of weight zero is not
    read, so that the end of a line is exactly the model that stands there. The weights need not sum to one.

    Args:
        states: modules or state dicts of one architecture; none is changed.
        weights: one number for each.

    Returns:
        A new state. Keys that are one tensor in a state are one tensor here. If one of the states is lazy, so is the result:
        a tensor is mixed when it is read.

    Raises:
        ValueError: if keys, shapes or kinds of dtype differ (naming the first difference), or if a weight is not finite.

    >>> interpolate([{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 4.0])}], [0.75, 0.25])
    {'w': tensor([1.0000, 2.5000])}
    """
    if len(states) != len(weights):
        raise ValueError(f"there are {len(states)} states and {len(weights)} weights; give one weight for each state")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be finite numbers, got {list(weights)}")
    weights = [float(weight) for weight in weights]
    if any(isinstance(state, LazyState) for state in states):
        return _interpolate_lazily([make_lazy(state) for state in states], weights)
    first, *others = read_alike(states)
    results: dict[int, Any] = {}
    for key, value in first.items():
        if id(value) not in results:
            results[id(value)] = _mix([value, *(other[key] for other in others)], weights)
    return {key: results[id(value)] for key, value in first.items()}


def _interpolate_lazily(states: list[LazyState], weights: list[float]) -> LazyState:
    first, *others = states
    for number, other in enumerate(others, start=2):
        _check_alike(first.shapes, other.shapes, f"model {number}")
    return first.map(lambda key, value: _mix([value, *(other[key] for other in others)], weights))


def read_alike(models: Sequence[nn.Module | Mapping[str, Any]]) -> list[State]:
    """The states of several models of one architecture, with the same keys; refuses models that are not alike.

    Keys that share memory in one state hold one tensor object in each, and a state that omits an alias gets it back.

    Raises:
        ValueError: naming the first difference to the first model.
    """
    if not models:
        raise ValueError("expected at least one model or state dict, got none")
    states = [_unite(read_state(model)) for model in models]
    ties = dict.fromkeys(keys for state in states for keys in _find_ties(state))
    for state in states:
        check_ties(state, ties)
        for keys in ties:
            known = next((state[key] for key in keys if key in state), None)
            if known is not None:
                state.update(dict.fromkeys(keys, known))
    for number, state in enumerate(states[1:], start=2):
        _check_alike(states[0], state, f"model {number}")
    return [{key: state[key] for key in states[0]} for state in states]


def _mix(values: list[Any], weights: Sequence[float]) -> Any:
    first = values[0]
    if not _is_mixed(first):
        return first.clone() if isinstance(first, Tensor) else first
    dtype = torch.float32
    for value in values:  # narrow types promote to nothing wider than float32, and float8 does not promote at all
        dtype = torch.promote_types(dtype, value.dtype) if value.dtype.itemsize >= 4 else dtype
    total = torch.zeros_like(first, dtype=dtype)
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total.add_(value.to(total.device, dtype), alpha=weight)
    return total.to(first.dtype)


def _is_mixed(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _unite(state: State) -> State:
    """One tensor object for keys that view the same memory: ``state_dict()`` detaches each key by itself."""
    first: dict[Any, Any] = {}
    return {key: first.setdefault(_identity(value), value) for key, value in state.items()}


def _identity(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta or value.numel() == 0:
        return id(value)
    return value.device, value.data_ptr(), value.shape, value.stride(), value.dtype


def _find_ties(state: State) -> list[tuple[str, ...]]:
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            keys.setdefault(id(value), []).append(key)
    return [tuple(group) for group in keys.values() if len(group) > 1]


def _check_alike(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    for key in first:
        if key not in other:
            raise ValueError(f"{name} has no {key!r}, which the first has: they are not of one architecture")
    for key in other:
        if key not in first:
            raise ValueError(f"{name} has {key!r}, which the first has not: they are not of one architecture")
    for key, value in first.items():
        if not isinstance(value, Tensor):
            continue
        if not isinstance(other[key], Tensor):
            raise ValueError(f"{key!r} is a tensor in the first model and a {type(other[key]).__name__} in {name}")
        if value.shape != other[key].shape:
            shapes = f"{tuple(value.shape)} in the first model and {tuple(other[key].shape)} in {name}"
            raise ValueError(f"{key!r} has shape {shapes}: they are not of one architecture")
        if _is_mixed(value) != _is_mixed(other[key]):
            raise ValueError(f"{key!r} is {value.dtype} in the first model and {other[key].dtype} in {name}")
