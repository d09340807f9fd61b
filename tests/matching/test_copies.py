"""Copy detection: a permuted copy is found by its fingerprints, and nothing else is taken for one."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.copies import find_copy
from onebasin.matching.problem import Problem
from onebasin.relaxation.objectives import parameter_keys
from onebasin.tensors.states import LazyState, read_state
from tests.networks import CASES

NAMES = [*list(CASES)[::5], "vision transformer", "lstm", "grouped conv", "tied embedding", "gpt"]


def problem_of(target, source, symmetry) -> Problem:
    return Problem(symmetry, read_state(source), read_state(target), parameter_keys(target), ob.WeightDistance())


def planted(name: str):
    torch.manual_seed(0)
    model = CASES[name].make()
    for value in model.parameters():  # fresh norms and biases are the same for every unit
        nn.init.normal_(value, std=0.5)
    symmetry = ob.symmetry(model, CASES[name].inputs(), verify=False)
    permutation = symmetry.random(torch.Generator().manual_seed(1))
    return model, symmetry, permutation


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_found(name):
    model, symmetry, permutation = planted(name)
    source = permutation.apply(model)
    found = find_copy(problem_of(model.state_dict(), source, symmetry))
    assert found is not None
    keys = parameter_keys(model)
    moved = found.apply(source)
    assert all(torch.equal(moved[key], model.state_dict()[key]) for key in keys)


def mlp(seed: int, width: int = 12) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def test_other_networks_are_no_copies_and_are_told_by_their_first_tensor():
    a, b = mlp(0), mlp(1)
    symmetry = ob.symmetry(a, torch.zeros(1, 5))
    read: list[str] = []

    def note(state: LazyState) -> LazyState:
        return state.map(lambda key, value: read.append(key) or value)

    target, source = (note(read_state(model.state_dict()).lazily()) for model in (a, b))
    assert find_copy(problem_of(target, source, symmetry)) is None
    assert read == ["0.weight", "0.weight"]


def test_the_same_numbers_in_another_order_are_no_copy():
    model = mlp(0)
    symmetry = ob.symmetry(model, torch.zeros(1, 5))
    source = dict(model.state_dict())
    source["2.weight"] = source["2.weight"].flatten()[torch.randperm(144)].view(12, 12)
    assert find_copy(problem_of(model.state_dict(), source, symmetry)) is None


def test_units_that_are_alike_may_change_places():
    model = mlp(0)
    with torch.no_grad():  # the first two units of the first layer are one and the same
        model[0].weight[1], model[0].bias[1] = model[0].weight[0], model[0].bias[0]
        model[2].weight[:, 1] = model[2].weight[:, 0]
    symmetry = ob.symmetry(model, torch.zeros(1, 5))
    source = symmetry.random(torch.Generator().manual_seed(0)).apply(model)
    found = find_copy(problem_of(model.state_dict(), source, symmetry))
    assert found is not None
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.apply(source).items())


def test_wide_layers_of_many_near_ties():
    """Of 2048 units some have sums that agree to six digits: more numbers than one are needed to tell them apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 4))
    symmetry = ob.symmetry(model, torch.zeros(1, 8), verify=False)
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    found = find_copy(problem_of(model.state_dict(), permutation.apply(model), symmetry))
    assert found == permutation.inverse()


@pytest.mark.parametrize("method", ["sinkhorn", "weight-matching"])
def test_both_methods_look_first(method):
    model = mlp(0)
    symmetry = ob.symmetry(model, torch.zeros(1, 5))
    twin = copy.deepcopy(model)
    permutation = symmetry.random(torch.Generator().manual_seed(3))
    twin.load_state_dict(permutation.apply(model))
    result = ob.align(twin, to=model, symmetry=symmetry, method=method)
    assert (result.permutation, result.cost, result.converged, len(result.history)) == (permutation.inverse(), 0.0, True, 1)
    assert result.logits is None
    other = ob.align(mlp(1), to=model, symmetry=symmetry, method=method)
    plain = ob.align(mlp(1), to=model, symmetry=symmetry, method=method, detect_copy=False)
    assert other.permutation == plain.permutation
