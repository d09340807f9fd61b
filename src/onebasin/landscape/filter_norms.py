"""The norms of filters kept when networks are mixed: a repair without data.

Half way between two filters that are not equal lies a shorter one, so that every layer of a mixed network makes weaker units
than its parents'. If the inputs of a layer are about as large in every direction, a unit's deviation is in proportion to the
norm of its filter, and a filter with the interpolated norm makes a unit with the interpolated deviation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onebasin.tensors.states import State, StateDict


def keep_norms(mixed: State, endpoints: Sequence[State], weights: Sequence[float], layers: Iterable[str]) -> StateDict:
    """Scale each filter of a mixed network to the interpolated norm of its parents' filters; biases stay as they are.

    Args:
        mixed: the average of the endpoints, each with its weight.
        endpoints: aligned.
        weights: of the endpoints.
        layers: whose units are the first axis of their weight.
    """
    result = StateDict(mixed.load())
    for layer in layers:
        key = f"{layer}.weight" if layer else "weight"
        goal = sum(w * _norms(state[key]).to(result[key].device) for w, state in zip(weights, endpoints, strict=True))
        found = _norms(result[key])
        factor = torch.where(found > 0, goal / found, torch.ones_like(found))
        shape = (-1, *(1,) * (result[key].dim() - 1))
        result[key] = (result[key].double() * factor.view(shape)).to(result[key].dtype)
    return result


def _norms(weight: Tensor) -> Tensor:
    return weight.double().flatten(1).norm(dim=1)
