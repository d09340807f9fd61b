import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.relaxation.plans import plan_shape
from onebasin.tensors.states import read_state
from tests.basis_networks import Gated
from tests.networks import CASES

NESTED = ["mlp tanh", "attention by hand", "grouped conv", "tied embedding", "batch norm 2d", "experts by bmm"]


@pytest.fixture(params=NESTED)
def case(request):
    torch.manual_seed(0)
    model = CASES[request.param].make().double()
    inputs = CASES[request.param].inputs()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return model, inputs, ob.symmetry(model, inputs)


def test_only_the_logits_are_parameters(case):
    model, _, symmetry = case
    net = ob.RebasinNet(model, symmetry)
    sizes = {str(group.size) for group in symmetry.groups.values()}
    assert set(net.state_dict()) == {f"logits.{size}" for size in sizes}
    assert sum(p.numel() for p in net.parameters()) == sum(
        torch.Size(plan_shape(symmetry, group)).numel() for group in symmetry.groups.values()
    )


def test_a_sharp_start_is_the_permutation(case):
    """With nearly all mass on a permutation, the soft tensors are the permuted ones, and it is found again."""
    model, _, symmetry = case
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    net = ob.RebasinNet(model, symmetry, init=permutation, mass=1 - 1e-9)
    expected = permutation.apply(model)
    soft = net()
    assert soft.keys() == expected.keys()
    for key, value in soft.items():
        torch.testing.assert_close(value.detach(), expected[key], rtol=1e-6, atol=1e-6)
    assert net.permutation() == permutation
    assert net.permutation(cost=lambda p: p.agreement(permutation)) is not None


@pytest.mark.parametrize("mass", [0.2, 0.5, 0.9])
def test_the_start_has_the_mass_asked_for(mass):
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 1))
    symmetry = ob.symmetry(model, torch.zeros(1, 2), verify=False)
    net = ob.RebasinNet(model, symmetry, init=symmetry.identity(), mass=mass, tau=0.5)
    for plan in net.plans().values():
        torch.testing.assert_close(plan.diagonal(), torch.full((len(plan),), mass), rtol=1e-4, atol=1e-4)
    paper = ob.RebasinNet(model, symmetry)
    assert torch.equal(paper.logits["10"].detach()[0], torch.eye(10))


@pytest.mark.parametrize("size", [2, 3, 9])
def test_a_start_is_found_again_whatever_the_size_and_the_mass(size):
    model = nn.Sequential(nn.Linear(2, size), nn.ReLU(), nn.Linear(size, 1))
    symmetry = ob.symmetry(model, torch.zeros(1, 2), verify=False)
    (group,) = symmetry.groups
    permutation = ob.Permutation(symmetry, {group: torch.arange(size).flip(0)})
    for mass in (0.01, 0.5):
        assert ob.RebasinNet(model, symmetry, init=permutation, mass=mass).permutation() == permutation


def test_soft_tensors_are_differentiable_in_logits_and_live_parameters(case):
    model, inputs, symmetry = case
    net = ob.RebasinNet(model, symmetry, noise=0.1, generator=torch.Generator().manual_seed(0))
    live = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    state = read_state(model)
    tied = {key: live[first] for keys in symmetry.ties for first in keys if first in live for key in keys}
    soft = net({**live, **tied})
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    torch.func.functional_call(model.eval(), soft, args).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert all(value.grad is not None for value in live.values())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_buffers_are_detached_and_fresh():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    symmetry = ob.symmetry(model, torch.rand(2, 1, 8, 8))
    net = ob.RebasinNet(model, symmetry)
    soft = net()
    assert not soft["1.running_var"].requires_grad
    assert soft["1.weight"].requires_grad
    before = copy.deepcopy(model.state_dict())
    torch.func.functional_call(model.train(), soft, torch.rand(2, 1, 8, 8))  # writes into the statistics it is given
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(net()["1.running_var"], torch.ones(4))


def test_a_cost_of_ones_own_in_an_ordinary_loop():
    """The paper's promise: any differentiable cost, all layers at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
    symmetry = ob.symmetry(model, torch.zeros(1, 3))
    planted = symmetry.random(torch.Generator().manual_seed(3))
    target = planted.apply(model)
    net = ob.RebasinNet(model, symmetry)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(60):
        soft = net()
        cost = sum((soft[key] - target[key]).abs().sum() for key in soft)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    assert net.permutation() == planted


@pytest.mark.parametrize(("arguments", "message"), [({"init": "zeros"}, "init must be"), ({"mass": 1.5}, "mass must lie")])
def test_refusals(arguments, message):
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    symmetry = ob.symmetry(model, torch.zeros(1, 2))
    with pytest.raises(ValueError, match=message):
        ob.RebasinNet(model, symmetry, **{"init": symmetry.identity(), **arguments})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_soft_tensors_on_cuda_are_those_on_the_cpu(case):
    model, _, symmetry = case
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    found = []
    for device, generator in zip(("cpu", "cuda"), generators, strict=True):
        net = ob.RebasinNet(copy.deepcopy(model).to(device), symmetry, init="random", generator=generator)
        soft = net()
        cost = sum(value.square().sum() for value in soft.values() if value.requires_grad)
        found.append((soft, torch.autograd.grad(cost, list(net.parameters()))))
    for key, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][key].cpu(), value)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-8)


@pytest.fixture
def gated():
    torch.manual_seed(0)
    model, x = Gated().double().eval(), torch.randn(5, 6).double()
    symmetry = ob.symmetry(model, x, kinds="all")
    assert len(symmetry.scales) == 1
    assert {basis.kind for basis in symmetry.bases.values()} == {"orthogonal", "signed"}
    return model, x, symmetry


def test_a_sharp_start_is_the_transform(gated):
    model, _, symmetry = gated
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    net = ob.RebasinNet(model, symmetry, init=transform, mass=1 - 1e-9)
    expected, soft = transform.apply(model), net()
    for key, value in expected.items():
        torch.testing.assert_close(soft[key], value, atol=1e-6, rtol=1e-6)
    found = net.transform()
    assert found.permutation == transform.permutation
    torch.testing.assert_close(found.matrices, transform.matrices)
    torch.testing.assert_close(found.logarithms, transform.logarithms)


def test_other_kinds_are_learned_in_an_ordinary_loop(gated):
    model, x, symmetry = gated
    drawn = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    target = drawn.apply(model)
    signs = {name: value for name, value in drawn.matrices.items() if symmetry.bases[name].kind == "signed"}
    net = ob.RebasinNet(model, symmetry, init=ob.Transform(drawn.permutation, {}, signs), tau=0.05, mass=0.99)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)

    def distance(state):
        return sum((state[key] - value).square().sum() for key, value in target.items())

    with torch.no_grad():
        start = float(distance(net()))
    for _ in range(300):
        optimizer.zero_grad()
        distance(net()).backward()
        optimizer.step()
    learned = net.transform().apply(model)
    assert float(distance(learned)) < 1e-3 * start
    moved = copy.deepcopy(model)
    moved.load_state_dict(learned)
    torch.testing.assert_close(moved(x), model(x), rtol=1e-9, atol=1e-11)


def test_gains_must_be_folded_for_changes_of_basis():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    x = torch.randn(4, 3).double()
    rotations = ob.symmetry(model, x, kinds="all")
    assert rotations.bases
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
    with pytest.raises(ValueError, match="must be filled with 1 for a change of basis"):
        ob.RebasinNet(model, rotations)
    for symmetry in (ob.symmetry(model, x), replace(rotations, bases={})):
        ob.RebasinNet(model, symmetry)
    form = ob.canonical(model, x).model
    start = ob.Transform.random(rotations, torch.Generator().manual_seed(1))
    moved = ob.RebasinNet(form, rotations, init=start, mass=1 - 1e-9)()
    torch.testing.assert_close(torch.func.functional_call(form, moved, (x,)), model(x), rtol=1e-6, atol=1e-6)
