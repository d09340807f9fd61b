import pytest
import torch
from torch import nn
from torch.func import functional_call

import onebasin as ob
from onebasin.cli.digits_demo import ResidualCNN
from onebasin.continual.strategies.soft_midpoint import SoftMidpoint
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
    return model, inputs, net, SoftMidpoint(model, symmetry, net, True, torch.Generator().manual_seed(2))


def test_the_point_and_its_gradients_are_those_of_the_equation(case):
    """Against the formula written out, differentiated by autograd in one piece."""
    model, inputs, net, midpoint = case

    def cost(params):
        return functional_call(model, params, (inputs,)).square().sum()

    midpoint.backward(cost)
    found = [parameter.grad.clone() for parameter in [*net.parameters(), *midpoint.delta.values()]]
    permuted = net()
    point = {name: (value + permuted[name]) / 2 + midpoint.delta[name] for name, value in midpoint.theta.items()}
    expected = torch.autograd.grad(cost(point), [*net.parameters(), *midpoint.delta.values()])
    for name, value in midpoint.make_leaves(midpoint.permute()).items():
        torch.testing.assert_close(value, point[name])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_fusing_with_a_hard_permutation(case):
    model, _, _, midpoint = case
    permutation = midpoint.symmetry.random(torch.Generator().manual_seed(0))
    permuted, fused = permutation.apply(model), midpoint.fuse(ob.Transform(permutation, {}), 0.7)
    for name, value in midpoint.theta.items():
        torch.testing.assert_close(fused[name], 0.7 * value + 0.3 * permuted[name] + midpoint.delta[name])


def test_without_plans_and_without_a_residual():
    model = make_mlp()
    symmetry = ob.symmetry(model, torch.rand(2, 6)).restrict(())
    midpoint = SoftMidpoint(model, symmetry, None, True, torch.Generator())
    point = midpoint.make_leaves(midpoint.permute())
    for name, value in model.named_parameters():
        assert torch.equal(point[name], value + midpoint.delta[name])
    bare = SoftMidpoint(model, symmetry, None, False, torch.Generator())
    assert all(torch.equal(bare.fuse(None, 0.5)[name], value) for name, value in model.named_parameters())
    assert bare.residual_norm() == 0


def test_a_parameter_that_the_cost_does_not_use():
    symmetry = ob.symmetry(make_mlp(), torch.rand(2, 6))
    midpoint = SoftMidpoint(make_mlp(), symmetry, None, True, torch.Generator())
    midpoint.backward(lambda params: params["0.weight"].sum())
    assert float(midpoint.delta["4.bias"].grad.abs().sum()) == 0
    assert torch.equal(midpoint.delta["0.weight"].grad, torch.ones(12, 6))


def test_hardened_it_is_the_fused_network_and_only_the_residual_changes_it(case):
    _, _, _, midpoint = case
    permutation = midpoint.symmetry.random(torch.Generator().manual_seed(0))
    fused = midpoint.fuse(ob.Transform(permutation, {}), 0.7)
    midpoint.harden(ob.Transform(permutation, {}), 0.7)
    point = midpoint.make_leaves(midpoint.permute())
    assert all(torch.equal(point[name], value) for name, value in fused.items())
    assert midpoint.net is None
