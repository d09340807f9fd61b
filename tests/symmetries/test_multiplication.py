"""Scales and matrices without a permutation, as `Symmetry.verify` draws them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.multiplication import UnpermutedSymmetry, describe_changes, draw
from onebasin.symmetries.verification import verify
from onebasin.tensors.states import read_state
from tests.basis_networks import with_gains


class Block(nn.Module):
    """A stream with a layer norm, and ReLU between two layers."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.up, self.down = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.leave = nn.Linear(8, 2)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x + self.down(torch.relu(self.up(self.norm(x)))))


@pytest.fixture
def case():
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(4, 3)
    return model, x, ob.symmetry(model, x, kinds="all")


def test_elements_change_weights_and_not_the_function(case):
    model, x, symmetry = case
    element = UnpermutedSymmetry(symmetry).random(torch.Generator().manual_seed(0))
    state = read_state(model).lazily()
    moved = element.apply(state).load()
    assert not torch.allclose(moved["up.weight"], state["up.weight"].double(), atol=0.1)
    torch.testing.assert_close(torch.func.functional_call(model.double(), moved, x.double()), model.double()(x.double()))
    group = symmetry.scales["up.weight"].group
    alone = element.only(group).apply(state).load()
    assert torch.equal(alone["enter.weight"], state["enter.weight"].double())
    assert not torch.allclose(alone["up.weight"], state["up.weight"].double(), atol=0.1)


def test_draws_have_all_names(case):
    _, _, symmetry = case
    logarithms, matrices = draw(symmetry, None)
    assert logarithms.keys() == symmetry.scales.keys() != set()
    assert matrices.keys() == symmetry.bases.keys() != set()


def test_verify_checks_scales_and_bases(case):
    model, x, symmetry = case
    assert symmetry.verify(model, x) < 1e-12
    scale = symmetry.scales["up.weight"]
    half = replace(scale, powers={key: value for key, value in scale.powers.items() if key != "down.weight"})
    wrong = replace(symmetry, scales={"up.weight": half})
    verify(wrong, model, x)  # permutations alone are right
    with pytest.raises(ValueError, match=f"^scaling or changing the basis changes the function on this .*'{scale.group}'"):
        wrong.verify(model, x)
    with pytest.raises(ValueError, match=r"^scaling changes the function"):
        replace(wrong, bases={}).verify(model, x)
    assert describe_changes(symmetry, "permuting") == "permuting, scaling or changing the basis"
    basis = symmetry.bases["enter.weight"]
    half = replace(basis, places={key: value for key, value in basis.places.items() if key != "leave.weight"})
    with pytest.raises(ValueError, match=f"changes the function .*'{basis.group}'"):
        replace(symmetry, bases={"enter.weight": half}).verify(model, x)


def test_verify_names_gains_that_are_not_folded(case):
    _, x, symmetry = case
    with pytest.raises(ValueError, match=r"'norm.weight' must be filled with 1 .* onebasin canonical"):
        symmetry.verify(with_gains(Block().eval()), x)
