"""How far two models are from each other, layer by layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.tensors.states import Model, read_state


class LayerDistance(NamedTuple):
    """Distances of the tensors of one layer, relative to their norm in the target.

    Attributes:
        before: the model as it was given.
        after: the aligned model.

    >>> from onebasin.tensors import LayerDistance
    >>> LayerDistance(before=1.4, after=0.9).after
    0.9
    """

    before: float
    after: float


def find_layer_distances(
    target: Model, model: Model, aligned: Model, aligned_target: Model | None = None
) -> dict[str, LayerDistance]:
    """How far a model is from a target before and after it was aligned, for each layer; `Report` shows it.

    A layer is all floating tensors whose names differ in their last part alone. Tensors are read one at a time.

    Args:
        target: what the model was aligned to: a module, a state dict or a lazy state, as the others.
        model: as it was given.
        aligned: the same model, aligned.
        aligned_target: what to compare the aligned model with, if the target changed too.

    >>> import torch
    >>> from onebasin.tensors import find_layer_distances
    >>> a, b, aligned = ({"fc.weight": torch.tensor(values)} for values in ([3.0, 4.0], [0.0, 0.0], [3.0, 4.0]))
    >>> find_layer_distances(a, b, aligned)
    {'fc': LayerDistance(before=1.0, after=0.0)}
    """
    first_state, given, moved = (read_state(each) for each in (target, model, aligned))
    other_state = None if aligned_target is None else read_state(aligned_target)
    sums: dict[str, Tensor] = {}
    for key in (key for key, shape in first_state.shapes.items() if shape.is_floating_point()):
        first = first_state[key].detach().double()
        other = first if other_state is None else other_state[key].detach().cpu().double()
        parts = (first, given[key].detach().double() - first, other, moved[key].detach().cpu().double() - other)
        squares = torch.stack([part.square().sum() for part in parts])
        layer = key.rpartition(".")[0] or key
        sums[layer] = sums[layer] + squares if layer in sums else squares
    return {layer: LayerDistance(*_divide(values)) for layer, values in sums.items()}


def _divide(sums: Tensor) -> tuple[float, float]:
    norm, before, other_norm, after = sums.sqrt().tolist()
    return (before / norm if norm else math.nan, after / other_norm if other_norm else math.nan)
