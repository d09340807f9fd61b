"""Sweeps over the groups: their scores, their order, and what they end at."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.methods.weight_matching import WeightMatching, sweep, sweep_all
from onebasin.matching.problem import Problem
from onebasin.matching.scores import score
from onebasin.relaxation.objectives import parameter_keys
from onebasin.tensors.states import read_state
from tests.matching.planted import X, mlp, pair, planted
from tests.networks import CASES


def problem_of(model: nn.Module, target: nn.Module, **options) -> Problem:
    keys = tuple(parameter_keys(target))
    symmetry = ob.symmetry(target, X)
    return Problem(symmetry, read_state(model), read_state(target), keys, ob.WeightDistance(keys=keys), **options)


@pytest.mark.parametrize("name", ["mlp relu", "batch norm 2d", "tied embedding"])
def test_anchored_order_finds_planted_permutations(name):
    torch.manual_seed(0)
    model = CASES[name].make()
    twin, symmetry, answer = planted(model, CASES[name].inputs(), seed=1)
    states = {"model": twin.state_dict(), "to": model.state_dict(), "symmetry": symmetry}
    result = ob.align(**states, method="weight-matching", order="anchored")
    assert result.permutation == answer
    with pytest.raises(ValueError, match="order must be 'anchored' or 'random', got 'x'"):
        ob.align(**states, method="weight-matching", order="x")


def test_scores_are_inner_products_of_units():
    a, b = pair()
    problem = problem_of(b, a)
    first = problem.symmetry.groups["0.weight"]
    scores, exact = score(problem, problem.source, [first], ["0.weight", "0.bias", "2.weight"])
    expected = a[0].weight @ b[0].weight.T + torch.outer(a[0].bias, b[0].bias) + a[2].weight.T @ b[2].weight
    torch.testing.assert_close(scores["0.weight"], expected.detach())
    assert exact


def test_sweeps_raise_the_inner_product_until_nothing_moves():
    a, b = pair()
    history = []
    problem = problem_of(b, a, report=history.append)
    match = WeightMatching().match(problem)
    inner = [entry["inner"] for entry in history]
    assert inner == sorted(inner)
    assert history[-1]["moved"] == 0
    assert match.converged
    assert match.cost == problem.cost(match.permutation) < problem.cost(problem.symmetry.identity())
    assert not WeightMatching(max_sweeps=1).match(problem).converged


def test_starts_that_are_swept_together_end_where_each_ends_alone(monkeypatch):
    """The same permutations and the same entries in the same order, whatever ran at the same time."""
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 3)) for _ in range(2))
    together, alone = [], []
    starts = [problem_of(b, a).symmetry.random(torch.Generator().manual_seed(seed)) for seed in range(4)]
    for history, num_threads in ((together, 3), (alone, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        for number, found in enumerate(sweep_all(problem_of(b, a, report=history.append), starts)):
            assert found == sweep(problem_of(b, a), starts[number])[0]
            history.append({"step": number})
    assert together == alone


def test_only_chosen_groups_move():
    model = mlp()
    twin, symmetry, _ = planted(model, X)
    found, _ = sweep(problem_of(twin, model), symmetry.identity(), only=["0.weight"])
    assert torch.equal(found["2.weight"], torch.arange(10))
    assert not torch.equal(found["0.weight"], torch.arange(10))
