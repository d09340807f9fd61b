import pytest
import torch
from torch import nn
from torch.func import functional_call

import onebasin as ob
from onebasin.cli.digits_demo import ResidualCNN
from onebasin.continual.strategies.halfway import HalfWay
from tests.continual.clusters import make_mlp

NETWORKS = {
    "mlp": (make_mlp, (6,)),
    "residual": (ResidualCNN, (1, 8, 8)),
    # Heads and the units inside each are nested groups.
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (3, 8)),
}


@pytest.fixture(params=NETWORKS)
def case(request):
    make, shape = NETWORKS[request.param]
    torch.manual_seed(0)
    model = make().double().eval()
    inputs = torch.randn(4, *shape, dtype=torch.float64)
    symmetry = ob.symmetry(model, inputs)
    net = ob.RebasinNet(model, symmetry, noise=0.3, generator=torch.Generator().manual_seed(1))
    return model, inputs, net, HalfWay(model, symmetry, net, True, torch.Generator().manual_seed(2))


def test_the_point_and_its_gradients_are_those_of_the_equation(case):
    """Against the formula written out, differentiated by autograd in one piece."""
    model, inputs, net, half_way = case

    def cost(params):
        return functional_call(model, params, (inputs,)).square().sum()

    half_way.backward(cost)
    found = [parameter.grad.clone() for parameter in [*net.parameters(), *half_way.delta.values()]]
    moved = net()
    point = {name: (value + moved[name]) / 2 + half_way.delta[name] for name, value in half_way.theta.items()}
    expected = torch.autograd.grad(cost(point), [*net.parameters(), *half_way.delta.values()])
    for name, value in half_way.place(half_way.move()).items():
        torch.testing.assert_close(value, point[name])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_fusing_with_a_hard_permutation(case):
    model, _, _, half_way = case
    permutation = half_way.symmetry.random(torch.Generator().manual_seed(0))
    moved, fused = permutation.apply(model), half_way.fuse(permutation, 0.7)
    for name, value in half_way.theta.items():
        torch.testing.assert_close(fused[name], 0.7 * value + 0.3 * moved[name] + half_way.delta[name])


def test_without_plans_and_without_a_residual():
    model = make_mlp()
    symmetry = ob.symmetry(model, torch.rand(2, 6)).restrict(())
    half_way = HalfWay(model, symmetry, None, True, torch.Generator())
    point = half_way.place(half_way.move())
    for name, value in model.named_parameters():
        assert torch.equal(point[name], value + half_way.delta[name])
    bare = HalfWay(model, symmetry, None, False, torch.Generator())
    assert all(torch.equal(bare.fuse(None, 0.5)[name], value) for name, value in model.named_parameters())
    assert bare.residual_length() == 0


def test_a_parameter_that_the_cost_does_not_use():
    symmetry = ob.symmetry(make_mlp(), torch.rand(2, 6))
    half_way = HalfWay(make_mlp(), symmetry, None, True, torch.Generator())
    half_way.backward(lambda params: params["0.weight"].sum())
    assert float(half_way.delta["4.bias"].grad.abs().sum()) == 0
    assert torch.equal(half_way.delta["0.weight"].grad, torch.ones(12, 6))


def test_settled_it_is_the_fused_network_and_only_the_residual_moves_it(case):
    _, _, _, half_way = case
    permutation = half_way.symmetry.random(torch.Generator().manual_seed(0))
    fused = half_way.fuse(permutation, 0.7)
    half_way.settle(permutation, 0.7)
    point = half_way.place(half_way.move())
    assert all(torch.equal(point[name], value) for name, value in fused.items())
    assert half_way.net is None
