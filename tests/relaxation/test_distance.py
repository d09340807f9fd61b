"""The distance by tensors is the distance of the softly permuted network, and so is its gradient."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from benchmarks.peak_memory import PeakMemory
from onebasin.relaxation.objectives import parameter_keys
from onebasin.tensors.states import read_state
from tests.relaxation.soft_cases import ALONE, BATCHED, JOINED, arrange, case

PLAIN = ["mlp tanh", "vgg with flatten", "conv1d and conv3d", "square transposed conv", "batch norm 2d", "residual mlp"]
STRUCTURED = [
    "densenet", "gru", "grouped conv", "multi-head attention", "gpt", "tied auto-encoder", "experts by bmm",
    "one unit read apart",
]  # fmt: skip


def found(distance, plans):
    """Cost, gradient in each plan."""
    gradients = {name: torch.zeros_like(plan) for name, plan in plans.items()}
    return distance(plans, gradients), gradients


def expected(net, source, target, objective):
    """By autograd through the softly permuted network: cost, gradient in each plan."""
    plans = {name: plan.detach().requires_grad_() for name, plan in net.plans().items()}
    cost = objective(net(source, plans), target)
    gradients = torch.autograd.grad(cost, list(plans.values()), allow_unused=True, materialize_grads=True)
    return cost.detach(), dict(zip(plans, gradients, strict=True))


@pytest.mark.parametrize("how", [ALONE, BATCHED, JOINED])
@pytest.mark.parametrize("kind", ["l2", "l1", "inner"])
@pytest.mark.parametrize("name", PLAIN + STRUCTURED)
def test_it_is_the_distance_of_the_soft_network(name, kind, how, monkeypatch):
    arrange(how, monkeypatch)
    net, source, target, keys = case(name)
    objective = ob.WeightDistance(kind, keys)
    distance = objective.of_plans(source, target, net.symmetry)
    if name in PLAIN:
        assert any(distance._portions) == (how != ALONE)
        assert distance.takes_any_alone == (how != JOINED)
    cost, gradients = found(distance, net.plans())
    wanted, wanted_gradients = expected(net, source, target, objective)
    torch.testing.assert_close(cost, wanted, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == wanted_gradients.keys()
    for group, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[group], gradient, rtol=1e-11, atol=1e-11)
    assert not cost.requires_grad
    assert not any(gradient.requires_grad for gradient in gradients.values())


def test_only_what_is_asked_for_counts():
    """A subset of the parameters, one of which no plan moves; groups that none of them knows have no gradient."""
    net, source, target, keys = case("mlp tanh")
    chosen = keys[-2:]
    objective = ob.WeightDistance(keys=chosen)
    cost, gradients = found(objective.of_plans(source, target, net.symmetry), net.plans())
    wanted, wanted_gradients = expected(net, source, target, objective)
    torch.testing.assert_close(cost, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-11, atol=1e-12)
    assert [bool(gradient.any()) for gradient in gradients.values()].count(True) == 1


def test_what_is_no_sum_over_parameters_goes_the_general_way():
    class Weighted(ob.WeightDistance):
        def __call__(self, params, target, batch=None):
            return 2 * super().__call__(params, target, batch)

    net, source, target, _ = case("batch norm 2d")
    assert ob.WeightDistance("cosine").of_plans(source, target, net.symmetry) is None
    assert Weighted().of_plans(source, target, net.symmetry) is None


def test_it_leaves_everything_as_it_is(monkeypatch):
    arrange(ALONE, monkeypatch)
    net, source, target, keys = case("vgg with flatten")
    plans = net.plans()
    before = copy.deepcopy([source, target, {name: plan.detach() for name, plan in plans.items()}])
    found(ob.WeightDistance(keys=keys).of_plans(source, target, net.symmetry), plans)
    for one, other in zip(before, [source, target, plans], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def deep_network(num_layers=6, width=64):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(1, width, 3), *layers, nn.Conv2d(width, 2, 3))


def test_float32_costs_are_exact_to_five_digits():
    a, b = deep_network(1, 160), deep_network(1, 160)
    with torch.no_grad():
        for parameter in a.parameters():
            parameter.add_(torch.randn_like(parameter))
    symmetry = ob.symmetry(a, torch.zeros(1, 1, 8, 8), verify=False)
    plans = ob.RebasinNet(a, symmetry).plans()
    keys = tuple(parameter_keys(a))
    for kind in ("l2", "l1"):
        objective = ob.WeightDistance(kind, keys)
        cost, _ = found(objective.of_plans(read_state(b), read_state(a), symmetry), plans)
        exact = {name: plan.detach().double() for name, plan in plans.items()}
        b64, a64 = ({key: value.double() for key, value in m.state_dict().items()} for m in (b, a))
        wanted, _ = found(objective.of_plans(b64, a64, symmetry), exact)
        assert float(cost) == pytest.approx(float(wanted), rel=1e-6)


def test_no_network_is_held():
    """Work space for one tensor and gradients of the plans, however many layers there are."""
    model = deep_network()
    symmetry = ob.symmetry(model, torch.zeros(1, 1, 16, 16), verify=False)
    state, plans = read_state(model), ob.RebasinNet(model, symmetry).plans()
    distance = ob.WeightDistance(keys=tuple(parameter_keys(model))).of_plans(state, state, symmetry)
    with PeakMemory() as memory:
        found(distance, plans)
    largest = max(value.nbytes for value in state.values())
    assert memory.peak < 3 * largest + 3 * sum(plan.nbytes for plan in plans.values())
