"""The default chooses a method, and says which one and why."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching import recommendation

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(32) % 2)]
LOSS = nn.functional.cross_entropy


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        ({}, "sinkhorn"),
        ({"steps": 3}, "sinkhorn"),
        ({"data": DATA}, "activation-matching"),
        ({"data": DATA, "objective": ob.Midpoint(LOSS)}, "sinkhorn"),
        ({"objective": ob.WeightDistance("inner")}, "sinkhorn"),
    ],
)
def test_what_is_chosen(arguments, method):
    result = ob.align(mlp(1), to=mlp(0), example_inputs=X, **arguments)
    assert result.method == method
    assert result.notes[0].startswith(f"{method} was chosen: ")
    named = ob.align(mlp(1), to=mlp(0), example_inputs=X, **{"method": method, **arguments})
    assert named.permutation == result.permutation
    assert not named.notes


def test_large_networks_are_matched_by_weights(monkeypatch):
    monkeypatch.setattr(recommendation, "_MOST_FLOPS", {"cpu": 1.0})
    result = ob.align(mlp(1), to=mlp(0), example_inputs=X)
    assert result.method == "weight-matching"
    assert "would take too long" in result.notes[0]


def test_a_copy_needs_no_method():
    model = mlp(0)
    symmetry = ob.symmetry(model, X)
    twin = symmetry.random(torch.Generator().manual_seed(1)).apply(model)
    result = ob.align(twin, to=model.state_dict(), symmetry=symmetry)
    assert result.cost == 0
    assert result.method == "copy detection"
    assert result.notes == ("The model is a permuted copy of the target: no method was run.",)
