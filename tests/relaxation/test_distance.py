"""The distance by tensors is the distance of the softly permuted network, and so is its gradient."""

import copy

import pytest
import torch
from networks import CASES
from torch import nn

import onebasin as ob
from benchmarks.peak_memory import PeakMemory
from onebasin.descent.cuda_graphs import NUM_WARMUP, CapturedStep
from onebasin.matching.methods.sinkhorn import find_distance, make_optimizer, make_step
from onebasin.matching.problem import Problem
from onebasin.relaxation import mixing
from onebasin.relaxation.objectives import as_objective, parameter_keys
from onebasin.tensors.states import read_state

PLAIN = ["mlp tanh", "vgg with flatten", "conv1d and conv3d", "square transposed conv", "batch norm 2d", "residual mlp"]
STRUCTURED = [
    "densenet", "gru", "grouped conv", "multi-head attention", "gpt", "tied auto-encoder", "experts by bmm",
    "one unit read apart",
]  # fmt: skip


def case(name):
    """A source, a target and plans in float64, and the symmetry of both."""
    torch.manual_seed(0)
    model = CASES[name].make()
    symmetry = ob.symmetry(model, CASES[name].inputs(), verify=False)
    model = model.double()
    target = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn_like(parameter))
    net = ob.RebasinNet(model, symmetry, noise=1.0, generator=torch.Generator().manual_seed(0))
    return net, read_state(model), read_state(target), tuple(parameter_keys(model))


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


ALONE, BATCHED, JOINED = "each alone", "small ones together", "side by side, as on CUDA"


def arrange(how, monkeypatch):
    """Which tensors share products depends on their sizes and on the device: have it so for the tiny networks here."""
    monkeypatch.setattr(mixing, "_STACKED_NUMEL", {} if how == ALONE else {"cpu": 1 << 12})
    monkeypatch.setattr(mixing, "_JOINED_NUMEL", {"cpu": 1 << 12} if how == JOINED else {})


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


def test_a_step_is_the_general_one(monkeypatch):
    """The same logits after some steps as with an objective that is not known to be a distance."""
    arrange(ALONE, monkeypatch)
    net, source, target, keys = case("vgg with flatten")
    objective = ob.WeightDistance(keys=keys)
    ended = []
    for given in (objective, as_objective(lambda params, target, batch: objective(params, target))):
        twin = copy.deepcopy(net)
        step = make_step(Problem(net.symmetry, source, target, keys, given), twin, make_optimizer(twin, 0.1))
        costs = torch.stack([step(None) for _ in range(5)])
        ended.append((costs, twin.state_dict()))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-9, atol=1e-9)


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


def test_a_distance_of_statistics_goes_the_general_way():
    """Buffers of the softly permuted network are detached: they cost something and have no gradient."""
    net, source, target, keys = case("batch norm 2d")
    statistic = next(key for key in source if key.endswith("running_mean"))
    for counted, known in ((keys, True), ((*keys, statistic), False)):
        problem = Problem(net.symmetry, source, target, keys, ob.WeightDistance(keys=counted))
        assert (find_distance(problem, net) is not None) == known


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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("width", [32, 1056], ids=["small ones together", "a large one alone"])
def test_a_captured_step_is_the_plain_one(width):
    torch.manual_seed(0)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)]
    a, b = nn.Sequential(*layers).cuda(), nn.Sequential(*copy.deepcopy(layers)).cuda()
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.copy_(torch.randn_like(parameter))
    symmetry = ob.symmetry(a, torch.zeros(1, 6, device="cuda"), verify=False)
    source, target, keys = read_state(b), read_state(a), tuple(parameter_keys(a))
    ended = []
    for capture in (False, True):
        net = ob.RebasinNet(b, symmetry)
        problem = Problem(symmetry, source, target, keys, ob.WeightDistance(keys=keys))
        assert (find_distance(problem, net) is not None) == (width > 1024)
        step = CapturedStep(make_step(problem, net, make_optimizer(net, 0.1)), capture, torch.device("cuda"))
        costs = torch.stack([step(None).clone() for _ in range(NUM_WARMUP + 6)])
        assert step.is_captured == capture
        ended.append((costs, net.state_dict()))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-4, atol=1e-4)
