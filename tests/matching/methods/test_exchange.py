"""Exchanges are predicted by derivatives, never raise the cost, and undo a few exchanges that were planted."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.methods.exchange import _exchange_effects, _ExchangeSearch, _make_disjoint, _take_lowest
from onebasin.matching.problem import Problem
from onebasin.relaxation.objectives import as_objective, parameter_keys
from onebasin.tensors.states import read_state
from tests.networks import CASES


def random_cost(params, target, batch):
    """A linear function of the parameters: its first-order effects are its changes."""
    generator = torch.Generator().manual_seed(0)
    return sum((params[k] * torch.randn(params[k].shape, generator=generator, dtype=torch.float64)).sum() for k in target)


@pytest.mark.parametrize("name", ["mlp relu", "attention by hand", "densenet", "gpt", "batch norm 2d"])
def test_first_order_effects_are_the_changes_of_a_linear_cost(name):
    torch.manual_seed(0)
    model = CASES[name].make()
    symmetry = ob.symmetry(model, CASES[name].inputs(), verify=False)
    model, keys = model.double(), parameter_keys(model)
    state = read_state(model)
    only = {key: state[key] for key in keys}
    problem = Problem(symmetry, state, state, keys, as_objective(lambda params, _, batch: random_cost(params, only, batch)))
    search = _ExchangeSearch(ob.Exchange(), problem)
    gradients = replace(problem, target=search._differentiate(None))
    for group in symmetry.groups.values():
        effects = _exchange_effects(gradients, search.current, group)
        assert effects.shape == (*(symmetry.sizes[p] for p in group.parents), group.size, group.size)
        pairs = _take_lowest(effects, 5)
        changes = search._try([[pair] for pair in pairs], group, [None])
        torch.testing.assert_close(changes, torch.stack([effects[pair] for pair in pairs]), rtol=1e-9, atol=1e-9)


def test_pairs():
    effects = torch.tensor([[0.0, 3.0, -1.0], [3.0, 0.0, 2.0], [-1.0, 2.0, 0.0]])
    assert _take_lowest(effects, 2) == [(0, 2), (1, 2)]
    assert _take_lowest(effects, 99) == [(0, 2), (1, 2), (0, 1)]
    assert _make_disjoint([(0, 1, 2), (0, 2, 3), (1, 2, 3), (0, 3, 4)]) == [(0, 1, 2), (1, 2, 3), (0, 3, 4)]


def pair(width: int = 12):
    torch.manual_seed(0)
    x = torch.randn(1024, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    networks = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        networks.append(model)
    return *networks, list(zip(x.split(64), y.split(64), strict=True))


@pytest.mark.parametrize("repaired", [False, True])
def test_the_loss_half_way_falls_on_data_that_was_not_judged(repaired):
    a, b, data = pair()
    start = ob.align(b, to=a, method="activation-matching", data=data)
    objective = ob.Midpoint(nn.functional.cross_entropy, repaired=repaired)
    result = ob.align(b, to=a, method="exchange", rounds=3, objective=objective, data=data, init=start.permutation)
    before = ob.align(
        b, to=a, method="exchange", rounds=1, candidates=1e-9, objective=objective, data=data, init=start.permutation
    )
    assert result.cost < before.cost <= before.start_cost
    assert sum(entry["exchanged"] for entry in result.history) > 0
    assert ob.symmetry(b, data[0][0]).verify(result.model, data[0][0]) < 1e-9
    for key, value in result.permutation.apply(b).items():
        assert torch.equal(value, result.model.state_dict()[key])


def test_planted_exchanges_are_undone():
    model = pair()[0]
    symmetry = ob.symmetry(model, torch.zeros(1, 5))
    indices = {name: index.clone() for name, index in symmetry.identity().indices.items()}
    for index in indices.values():
        index[[0, 3]] = index[[3, 0]]
    twin = ob.Permutation(symmetry, indices).apply(model)
    result = ob.align(twin, to=model.state_dict(), symmetry=symmetry, method="exchange", detect_copy=False)
    assert result.cost == 0
    assert result.converged
