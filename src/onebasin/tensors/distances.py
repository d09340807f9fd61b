"""How far two models are from each other, layer by layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.tensors.states import State


class LayerDistance(NamedTuple):
    """Distances of the tensors of one layer, relative to their norm in the target.

    Attributes:
        before: the model as it was given.
        after: the aligned model.
    """

    before: float
    after: float


def find_layer_distances(
    target: State, model: State, aligned: State, aligned_target: State | None = None
) -> dict[str, LayerDistance]:
    """How far a model is from a target before and after it was aligned, for each layer.

    A layer is all floating tensors whose names differ in their last part alone. Tensors are read one at a time.

    Args:
        target: what the model was aligned to.
        model: as it was given.
        aligned: the same model, aligned.
        aligned_target: what to compare the aligned model with, if the target changed too.

    >>> from onebasin.tensors.states import StateDict
    >>> states = [StateDict({"fc.weight": torch.tensor(values)}) for values in ([3.0, 4.0], [0.0, 0.0], [3.0, 4.0])]
    >>> find_layer_distances(*states)
    {'fc': LayerDistance(before=1.0, after=0.0)}
    """
    sums: dict[str, Tensor] = {}
    for key in (key for key, shape in target.shapes.items() if shape.is_floating_point()):
        first = target[key].detach().double()
        other = first if aligned_target is None else aligned_target[key].detach().cpu().double()
        parts = (first, model[key].detach().double() - first, other, aligned[key].detach().cpu().double() - other)
        squares = torch.stack([part.square().sum() for part in parts])
        layer = key.rpartition(".")[0] or key
        sums[layer] = sums[layer] + squares if layer in sums else squares
    return {layer: LayerDistance(*_divide(values)) for layer, values in sums.items()}


def _divide(sums: Tensor) -> tuple[float, float]:
    norm, before, other_norm, after = sums.sqrt().tolist()
    return (before / norm if norm else math.nan, after / other_norm if other_norm else math.nan)
