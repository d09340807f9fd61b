"""Biases of a mixed network corrected without data (Qu and Horvath 2024, arXiv 2402.05966)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import names
from onebasin.tensors.states import State, StateDict


def calibrate_biases(
    mixed: State, endpoints: Sequence[State], weights: Sequence[float], symmetry: Symmetry
) -> tuple[StateDict, tuple[str, ...]]:
    """Give the l-th layer of a chain of layers without norms the bias sum_i w_i^l b_i.

    Where the endpoints' weights are unrelated, each layer of the mixed network passes on only the share w_i of what came
    from endpoint i, so that after l layers w_i^l of its signal is left. A bias that shrinks alike stays in proportion to it.

    Args:
        mixed: the average of the endpoints, each with its weight.
        endpoints: aligned.
        weights: of the endpoints.
        symmetry: says which layer reads which.

    Returns:
        A new state, and the layers whose bias was calibrated.

    Raises:
        ValueError: if the network is no chain of linear or convolutional layers without norms.
    """
    result = StateDict(mixed.load())
    calibrated = []
    for depth, layer in enumerate(_find_chain(symmetry, mixed), start=1):
        key = f"{layer}.bias" if layer else "bias"
        if key in result:
            biases = torch.stack([state[key].to(result[key].device, torch.float64) for state in endpoints])
            shares = torch.tensor(weights, dtype=torch.float64, device=biases.device) ** depth
            result[key] = (shares @ biases).to(result[key].dtype)
            calibrated.append(layer)
    if not calibrated:
        raise ValueError("no layer has a bias to calibrate")
    return result, tuple(calibrated)


def check_chain(symmetry: Symmetry, state: State) -> None:
    """Refuse a network that is no chain of linear or convolutional layers without norms.

    Raises:
        ValueError: saying why.
    """
    _find_chain(symmetry, state)


def _find_chain(symmetry: Symmetry, state: State) -> list[str]:
    """The layers in order: each reads the free units of the one before."""
    readers, makers = _find_readers_and_makers(symmetry, state)
    starts = [layer for layer, read in readers.items() if not read]
    order: list[str] = []
    while len(starts) == 1:
        order += starts
        made = makers[starts[0]]
        starts = [layer for layer, read in readers.items() if made and read == made]
    if len(order) < len(readers) or starts:
        raise ValueError(
            "the form 'bias' is for a chain of layers, each of which reads the free units of the one before alone"
        )
    return order


def _find_readers_and_makers(symmetry: Symmetry, state: State) -> tuple[Mapping[str, set[str]], Mapping[str, set[str]]]:
    """For each layer the groups that its weight has on its input axis, and those on its output axis."""
    readers, makers = {}, {}
    parts = {key: (*key.rpartition(".")[::2], symmetry.layouts[key]) for key in state.shapes}
    for layer, name, layout in parts.values():
        if name == "running_mean" or (name == "weight" and len(layout) == 1):
            raise ValueError(f"the form 'bias' is for networks without norms, and {layer!r} is one")
    for key, (layer, name, layout) in parts.items():
        if name == "weight" and len(layout) > 1:
            makers[layer], readers[layer] = (names((axis,)) & symmetry.groups.keys() for axis in layout[:2])
        elif name != "bias":
            raise ValueError(
                "the form 'bias' is for a chain of linear or convolutional layers without norms, each with a weight of "
                f"several axes and at most a bias, and this network has {key!r}"
            )
    return readers, makers
