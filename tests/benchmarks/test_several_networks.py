"""The benchmark of several networks: its own ways find planted copies, and its page shows every way."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks import several_networks
from benchmarks.several_networks import WAYS, by_frank_wolfe, by_merging, by_one_descent, parameters, sum_distances


@pytest.fixture
def copies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    symmetry = ob.symmetry(model, torch.randn(8, 4))
    models = [model]
    for seed in (1, 2):
        models.append(copy.deepcopy(model))
        models[-1].load_state_dict(symmetry.random(torch.Generator().manual_seed(seed)).apply(model))
    return models, symmetry


@pytest.mark.parametrize("move", [by_frank_wolfe, by_one_descent, by_merging("common", method="sinkhorn")])
def test_copies_are_brought_together_and_the_first_stays(copies, move):
    models, symmetry = copies
    moved = [permutation.apply(model) for model, permutation in zip(models, move(models, symmetry), strict=True)]
    for state in moved:
        assert all(torch.equal(value, models[0].state_dict()[key]) for key, value in state.items())


def test_the_distance_is_that_of_all_pairs(copies):
    states = parameters(copies[0])
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum(((states[i][key] - states[j][key]) ** 2).sum() for i, j in pairs for key in states[0])
    assert torch.isclose(sum_distances(states), torch.as_tensor(expected), rtol=1e-5)


def test_the_page_has_a_row_for_every_way():
    numbers = {"agreement": 1.5, "accuracy": 0.25, "seconds": 3.0}
    records = [{"config": {"way": way, "seeds": [0, 1, 2]}, "result": numbers} for way in WAYS]
    page = several_networks.draw(records)
    assert all(f"| {way} | 25.0 | 25.0 | 1.500 | 3 |" in page for way in WAYS)
