"""The default chooses a method, and says which one and why."""

import copy

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
        ({"data": DATA, "objective": ob.Midpoint(LOSS), "steps": 3}, "sinkhorn"),
        ({"objective": lambda params, target, batch: (params["0.weight"] - target["0.weight"]).square().sum()}, "sinkhorn"),
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


@pytest.mark.parametrize("named", [{}, {"objective": ob.WeightDistance()}])
def test_a_scaled_copy_is_found_by_default(named):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)).double()
    symmetry = ob.symmetry(model, X.double(), kinds="positive")
    moved = copy.deepcopy(model)
    moved.load_state_dict(ob.Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(model))
    result = ob.align(moved, to=model, example_inputs=X.double(), kinds="positive", **named)
    assert result.method == "weight-matching"
    assert result.cost < 1e-12 * result.start_cost


def test_with_data_and_an_objective_methods_follow_each_other():
    options = {"data": DATA, "objective": ob.Midpoint(LOSS)}
    result = ob.align(mlp(1), to=mlp(0), example_inputs=X, **options)
    assert result.method == "activation-matching, sinkhorn, sinkhorn from plans of mass 0.999, exchange"
    names = "activation-matching, then sinkhorn, then sinkhorn from plans of mass 0.999, then exchange"
    assert result.notes[0].startswith(f"{names} were chosen: ")
    titles = [note.split(" lowered")[0].split(" left")[0] for note in result.notes[1:]]
    assert titles == ["sinkhorn", "sinkhorn from plans of mass 0.999", "exchange"]
    costs = [ob.align(mlp(1), to=mlp(0), example_inputs=X, method="activation-matching", **options).cost]
    by_hand = ob.align(mlp(1), to=mlp(0), example_inputs=X, method="sinkhorn", init="activation-matching", **options)
    costs += [by_hand.cost]
    for method in (recommendation.SHARP, ob.Exchange(rounds=2)):
        by_hand = ob.align(mlp(1), to=mlp(0), example_inputs=X, method=method, init=by_hand.permutation, **options)
        costs += [by_hand.cost]
    assert by_hand.permutation == result.permutation
    assert costs == sorted(costs, reverse=True)
    assert result.cost == pytest.approx(costs[-1])


@pytest.mark.parametrize("pair", [9, 11])
def test_a_model_that_is_aligned_already_ends_no_higher(pair):
    """Activation matching does not look at the objective, and raises it here."""
    options = {"example_inputs": X, "data": DATA, "objective": ob.Midpoint(LOSS)}
    target = mlp(2 * pair)
    aligned = ob.align(mlp(2 * pair + 1), to=target, method="sinkhorn", steps=60, init="exchange", **options)
    assert ob.align(aligned.model, to=target, method="activation-matching", **options).cost > aligned.cost
    again = ob.align(aligned.model, to=target, **options)
    assert again.cost <= again.start_cost


def test_what_the_user_starts_from_takes_the_place_of_activation_matching():
    options = {"data": DATA, "objective": ob.Midpoint(LOSS), "init": "weight-matching"}
    assert (
        ob.align(mlp(1), to=mlp(0), example_inputs=X, **options).method
        == "sinkhorn, sinkhorn from plans of mass 0.999, exchange"
    )


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


def test_permutations_are_learned_after_signs_are_found():
    """Signs are not learned, so they are no reason to leave out the descent."""
    options = {"data": DATA, "objective": ob.Midpoint(LOSS), "kinds": "all"}
    result = ob.align(mlp(1), to=mlp(0), example_inputs=X, **options)
    assert {basis.kind for basis in result.transform.symmetry.bases.values()} == {"signed"}
    assert result.method == "activation-matching, sinkhorn, sinkhorn from plans of mass 0.999, exchange"
    first = ob.align(mlp(1), to=mlp(0), example_inputs=X, method="activation-matching", **options)
    assert result.cost <= first.cost
    torch.testing.assert_close(result.model(X), mlp(1)(X))


def test_scales_are_learned_without_a_descent():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    options = {"data": DATA, "objective": ob.Midpoint(LOSS), "kinds": "all", "scaling": ob.Scaling(steps=2)}
    result = ob.align(copy.deepcopy(model), to=model, example_inputs=X, **options)
    assert result.method == "activation-matching"
    assert "scales and bases are learned best from there" in result.notes[0]
