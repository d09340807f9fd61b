"""The normalised twin of a network without norms: the same function, with REPAIR built in.

Behind every linear or convolutional layer that makes free units stands a batch norm whose scale and shift are the deviation
and the mean of the layer's own outputs, so that in eval mode the twin computes what the network computes. Half way between
two twins the scales and shifts are the averages of the parents'. A batch norm that uses the statistics of the batch, or
statistics that were estimated anew, gives each unit just those: that is REPAIR, inside the loss and differentiable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import copy_model
from onebasin.landscape.calibration import find_layers, measure_units
from onebasin.symmetries import Scale, Symmetry
from onebasin.symmetries.layout import Layout
from onebasin.tensors.states import StateDict, read_state_dict

_NORMS: Mapping[type[nn.Module], Any] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
_EPS = 1e-8


class NormalisedLayer(nn.Module):
    """A layer and the batch norm behind it."""

    def __init__(self, layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        super().__init__()
        self.layer = layer
        norm = next(norm for kind, norm in _NORMS.items() if isinstance(layer, kind))
        weight = layer.weight
        self.norm = norm(weight.shape[0], eps=_EPS, device=weight.device, dtype=weight.dtype)
        self.register_forward_hook(_do_nothing)

    @property
    def weight(self) -> Tensor:
        """Of the layer: some networks look up its type, as T5 does."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The normalised output of the layer."""
        y = self.layer(x)
        # The units of a linear layer are the last axis, whatever stands before it.
        return self.norm(y.flatten(0, -2)).view_as(y) if isinstance(self.layer, nn.Linear) else self.norm(y)


def _do_nothing(*_: Any) -> None:
    """A hook: PyTorch computes a transformer layer in one kernel, without its norms, unless something in it has a hook."""


def has_twin(model: nn.Module, symmetry: Symmetry, data: Iterable[Any]) -> bool:
    """Whether `make_twin` would make one; it runs one batch."""
    return bool(find_layers(copy_model(model), symmetry, data)[0])


def make_twin(model: nn.Module, symmetry: Symmetry, data: Iterable[Any]) -> tuple[nn.Module, Symmetry] | None:
    """A copy of a network with a batch norm behind each layer that makes free units, and its symmetry, of the same groups.

    Args:
        model: left untouched.
        symmetry: of the model.
        data: batches to measure the mean and the deviation of each layer's outputs on.

    Returns:
        None if every such layer has a batch norm already, or none can have one.
    """
    twin = copy_model(model)
    axes, _ = find_layers(twin, symmetry, data)
    if not axes:
        return None
    statistics = measure_units(twin, axes, data)
    for path in axes:
        parent, _, name = path.rpartition(".")
        wrapped: Any = NormalisedLayer(twin.get_submodule(path))  # type: ignore[arg-type]
        norm = wrapped.norm
        mean, variance = statistics[path].mean, statistics[path].std.square()
        with torch.no_grad():
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
            norm.weight.copy_((variance + _EPS).sqrt())
            norm.bias.copy_(mean)
        setattr(twin.get_submodule(parent), name, wrapped.eval())
    return twin, _extend_symmetry(symmetry, axes)


def _extend_symmetry(symmetry: Symmetry, paths: Collection[str]) -> Symmetry:
    layouts: dict[str, Layout] = {_twin_key(key, paths): layout for key, layout in symmetry.layouts.items()}
    for path in paths:
        for name in ("weight", "bias", "running_mean", "running_var"):
            layouts[f"{path}.norm.{name}"] = symmetry.layouts[f"{path}.bias"]
        layouts[f"{path}.norm.num_batches_tracked"] = ()
    ties = tuple(tuple(_twin_key(key, paths) for key in keys) for keys in symmetry.ties)
    scales = {name: _extend_scale(scale, paths) for name, scale in symmetry.scales.items()}
    return replace(symmetry, layouts=layouts, ties=ties, scales=scales)


def _extend_scale(scale: Scale, paths: Collection[str]) -> Scale:
    """A scale of the network: the twin of the scaled network is the twin of the network, scaled so."""
    powers = {_twin_key(key, paths): found for key, found in scale.powers.items()}
    offsets = dict(scale.offsets)
    for path in paths:
        if made := scale.powers.get(f"{path}.bias"):
            powers.update({f"{path}.norm.{name}": made for name in ("weight", "bias", "running_mean")})
            powers[f"{path}.norm.running_var"] = tuple(power._replace(exponent=2 * power.exponent) for power in made)
            offsets[f"{path}.norm.running_var"] = _EPS
    return replace(scale, powers=powers, offsets=offsets)


def fold_twin(twin: nn.Module, model: nn.Module) -> StateDict:
    """The state of a network that computes what its twin computes in eval mode.

    Args:
        twin: its batch norms hold statistics.
        model: the architecture without them.
    """
    state = read_state_dict(twin)
    layers = {path: layer for path, layer in twin.named_modules() if isinstance(layer, NormalisedLayer)}
    result = {key: state[_twin_key(key, layers)] for key in read_state_dict(model)}
    for path, layer in layers.items():
        factor = layer.norm.weight / (layer.norm.running_var + layer.norm.eps).sqrt()
        weight, bias = result[f"{path}.weight"], result[f"{path}.bias"]
        result[f"{path}.weight"] = weight * factor.detach().view(-1, *(1,) * (weight.dim() - 1))
        result[f"{path}.bias"] = ((bias - layer.norm.running_mean) * factor + layer.norm.bias).detach()
    return StateDict(result)


def _twin_key(key: str, paths: Collection[str]) -> str:
    path, _, name = key.rpartition(".")
    return f"{path}.layer.{name}" if path in paths else key
