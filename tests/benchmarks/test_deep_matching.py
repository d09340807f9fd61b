"""The benchmark of permutations of deep networks: its own variants do what they say, and its page shows every row."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks import deep_matching
from benchmarks.deep_matching import WITH_DATA, WITHOUT_DATA, ConvexToConcave, Pair, match_at, search_by_frank_wolfe

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.arange(64) % 2)]


@pytest.fixture
def planted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    symmetry = ob.symmetry(model, X)
    moved = copy.deepcopy(model)
    drawn = symmetry.random(torch.Generator().manual_seed(1))
    moved.load_state_dict(drawn.apply(model))
    return Pair(model, moved, symmetry, DATA, 0.0), drawn.inverse()


def test_frank_wolfe_finds_a_copy_and_leaves_the_first_network_alone(planted):
    pair, answer = planted
    assert search_by_frank_wolfe(pair) == answer


def test_activations_are_matched_at_the_modules_that_are_named(planted):
    pair, answer = planted
    assert match_at("2", "4")(pair) == answer
    nowhere = match_at("no such module")(pair)  # then units are matched by their weights
    assert nowhere == answer


def test_the_relaxation_of_a_step_is_the_distance_for_a_hard_permutation(planted):
    pair, _ = planted
    objective = ConvexToConcave(2).bind(pair.target)
    target, source = pair.parameters()
    distance = ob.WeightDistance().bind(pair.target)(source, target, None)
    norm = sum(value.square().sum() for value in source.values())
    for weight in (1, 0, -1, -1):
        assert torch.isclose(objective(source, target, None), distance + (weight - 1) * norm, rtol=1e-5)
    assert torch.isclose(objective.judge(source, target, None), distance, rtol=1e-5)


def test_the_page_has_a_row_for_every_method():
    names = [*WITHOUT_DATA, *WITH_DATA]
    numbers = {"accuracy": 0.5, "excess loss": 1.0, "distance": 2.0, "seconds": 3.0}
    records = [
        {"method": name, "seeds": list(seeds), **numbers, "commit": "abc", "torch": "2"}
        for name in names
        for seeds in deep_matching.SEEDS
    ]
    page = deep_matching.write_tables(records)
    assert all(f"| {name} | 50.0 | 50.0, 50.0, 50.0 | 1.00 | 2 | 3.0 |" in page for name in names)
