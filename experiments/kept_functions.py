"""How far an alignment moves the function of the network that it transforms, and how well conditioned its bases are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.symmetries.transform_sizes import measure_bases


def measure_end(source: nn.Module, found: ob.Alignment | None, inputs: Tensor) -> dict[str, float]:
    """What an alignment did to its source.

    Args:
        source: as it was given to `onebasin.align`.
        found: the alignment; nothing was done if None.
        inputs: a batch that the outputs are compared on.

    Returns:
        "change" of the outputs in the network's own precision, relative to the largest; "change in float64", the same of the
        transform applied to the network in float64; and the largest "condition" number of the matrices of its bases.
    """
    if found is None:
        return {"change": 0.0, "change in float64": 0.0, "condition": 1.0}
    exact = copy.deepcopy(source).double()
    return {
        "change": measure_change(source, found.model, inputs),
        "change in float64": measure_change(exact, transform(exact, found, inputs), inputs),
        "condition": max((each.condition for each in measure_bases(found.transform)), default=1.0),
    }


def transform(source: nn.Module, found: ob.Alignment, inputs: Tensor) -> nn.Module:
    """The network as the transform that was found moves it, from its canonical form if there are bases."""
    moved = copy.deepcopy(source)
    state = ob.canonical(source, _like(source, inputs[:2])).state if found.matrices else source.state_dict()
    moved.load_state_dict(found.transform.apply(state))
    return moved


@torch.no_grad()
def measure_change(before: nn.Module, after: nn.Module, inputs: Tensor) -> float:
    """The largest difference of outputs, relative to the largest output, in the networks' own precision."""
    first, second = (model(_like(before, inputs)) for model in (before, after))
    return float((first - second).abs().max() / first.abs().max())


def _like(model: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs in the precision of a model, unless they are numbers of tokens."""
    return inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs
