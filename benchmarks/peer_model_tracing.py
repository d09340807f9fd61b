"""Two tests of model-tracing (Zhu et al., 2025), written from their description, for the units of MLPs.

Constrained: rows of the first layer of an MLP are assigned by cosine, and Spearman's correlation of the map with the
identity is tested. Unconstrained, for gated units: units are assigned by gate activations and, separately, by the
activations of the other branch, and Spearman's correlation between the two maps is tested. P-values of layers are combined
by Fisher's method.
Networks without gates are first distilled into gated ones there; that is left out.
"""

from __future__ import annotations

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.provenance_networks import FORGETFUL, read_data
from onebasin.lineage.chance import combine
from onebasin.relaxation.assignment import assign

_UNITS = {
    "MLP": ("1.weight", "3.weight"),
    FORGETFUL: ("1.weight", "3.weight"),
    "CNN with batch norm": ("0.weight", "3.weight", "6.weight"),
    "ViT": ("blocks.0.linear1.weight", "blocks.1.linear1.weight"),
    "GPT-2-like": ("mlps.0.first.weight", "mlps.1.first.weight"),
    "Llama-like": ("mlps.0.up.weight", "mlps.1.up.weight"),
}
"""The matrices whose rows are units."""


def constrained(family: str, a: nn.Module, b: nn.Module) -> float:
    """The p-value of units in the same places."""
    p_values = []
    for key in _UNITS[family]:
        rows = [nn.functional.normalize(model.state_dict()[key].flatten(1)) for model in (a, b)]
        p_values.append(_correlate(assign(rows[0] @ rows[1].T), torch.arange(len(rows[0]))))
    return combine(p_values)


def unconstrained(family: str, a: nn.Module, b: nn.Module) -> float | None:
    """The p-value of equal maps by gates and by the other branch; None for networks without gates."""
    if family != "Llama-like":
        return None
    inputs, p_values = read_data(family)[0][:64], []
    records = [_record(model, inputs) for model in (a, b)]
    for block in range(2):
        maps = []
        for branch in ("gate", "up"):
            ours, theirs = (record[f"mlps.{block}.{branch}"] for record in records)
            maps.append(assign(-torch.cdist(ours.T, theirs.T).square()))
        p_values.append(_correlate(*maps))
    return combine(p_values)


def _correlate(one: Tensor, other: Tensor) -> float:
    return float(spearmanr(one.numpy(), other.numpy(), alternative="greater").pvalue)


def _record(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".up")):
            handles.append(
                module.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.flatten(0, -2)}))
            )
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found
