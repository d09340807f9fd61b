"""The smallest weights that compute the same do not depend on where one starts."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.balancing import balance
from onebasin.tensors.states import read_state
from tests.basis_networks import MLP, Attention, D, Model, RMSNorm, SwiGLU

NETWORKS = {
    "ReLU": lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)),
    "linear": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4)),
    "heads": lambda: Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]),
    "rotary pairs and gates": lambda: Model([Attention(rotate="halves"), SwiGLU()], [RMSNorm() for _ in range(3)]),
}


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    shape = (2, 4, 3) if "a" in name and name != "linear" else (4, 3)
    return NETWORKS[name]().double().eval(), torch.randn(shape).double()


def sum_squares(state):
    return sum(float(value.square().sum()) for value in state.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_start_ends_in_the_same_place(name):
    model, x = make(name)
    symmetry = ob.symmetry(model, x, kinds="all")
    keys = [key for key, _ in model.named_parameters() if key not in symmetry.fixed]
    sizes = []
    for seed in (None, 0, 1):
        state = read_state(model)
        if seed is not None:
            state = ob.Transform.random(symmetry, torch.Generator().manual_seed(seed)).apply(state)
        smallest = balance(symmetry, state, keys).apply(state)
        sizes.append(sum_squares({key: smallest[key] for key in keys}))
        assert sizes[-1] <= sum_squares({key: state[key] for key in keys}) * (1 + 1e-12)
        moved = copy.deepcopy(model)
        moved.load_state_dict(smallest)
        torch.testing.assert_close(moved(x), model(x), rtol=1e-9, atol=1e-11)
    assert sizes[1:] == pytest.approx([sizes[0]] * 2, rel=1e-7)


def test_what_makes_a_unit_is_as_large_as_what_reads_it():
    model, x = make("ReLU")
    with torch.no_grad():
        model[0].weight *= 7
    symmetry = ob.symmetry(model, x, kinds="positive")
    state = balance(symmetry, read_state(model), [key for key, _ in model.named_parameters()]).apply(model)
    made = state["0.weight"].square().sum(1) + state["0.bias"].square()
    torch.testing.assert_close(made, state["2.weight"].square().sum(0), rtol=1e-6, atol=0)


def test_scales_without_a_best_value_stay():
    """A filter before a batch norm could shrink for ever."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    symmetry = ob.symmetry(model, torch.randn(4, 3).double(), kinds="positive")
    found = balance(symmetry, read_state(model), [key for key, _ in model.named_parameters()])
    alone = [s.name for s in symmetry.scales.values() if "1.running_var" in s.powers]
    assert alone
    assert not set(alone) & found.logarithms.keys()


def test_units_that_are_zero_stay():
    model, x = make("ReLU")
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, 0
        model[2].weight[:, 3] = 0
    symmetry = ob.symmetry(model, x, kinds="positive")
    state = balance(symmetry, read_state(model), [key for key, _ in model.named_parameters()]).apply(model)
    assert all(bool(value.isfinite().all()) for value in state.values())
    torch.testing.assert_close(state["0.weight"][3], model[0].weight[3].detach())
