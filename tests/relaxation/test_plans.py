"""A permutation as plans moves tensors as the permutation does, nested groups included."""

import pytest
import torch

import onebasin as ob
from onebasin.relaxation.hardening import harden
from onebasin.relaxation.plans import plan_shape, plans_of
from onebasin.symmetries.mixing import mix_all
from onebasin.tensors.states import read_state
from tests.networks import CASES


@pytest.mark.parametrize("name", ["mlp relu", "attention by hand", "grouped conv", "densenet", "gpt"])
def test_hard_plans(name):
    torch.manual_seed(0)
    model = CASES[name].make()
    symmetry = ob.symmetry(model, CASES[name].inputs(), verify=False)
    model = model.double()
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    plans = plans_of(permutation, torch.float64)
    assert {n: tuple(p.shape) for n, p in plans.items()} == {n: plan_shape(symmetry, g) for n, g in symmetry.groups.items()}
    state = {key: value for key, value in read_state(model).shapes.items() if value.is_floating_point()}
    mixed, moved = mix_all(state, symmetry.layouts, plans, symmetry.parents), permutation.apply(model)
    for key, value in mixed.items():
        torch.testing.assert_close(value, moved[key], rtol=0, atol=1e-12)
    assert harden(symmetry, plans) == permutation
