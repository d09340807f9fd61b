"""Transforming and then taking a step is taking a step and then transforming, where moments can follow."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def assert_commutes(model, x, transform, make):
    """Train, transform both, train on: the same as training on and transforming then."""
    optimizer = make(model.parameters())
    for _ in range(3):
        step(model, optimizer, x)
    twin = copy.deepcopy(model)
    twin.load_state_dict(transform.apply(model))
    other = make(twin.parameters())
    other.load_state_dict(transform.apply_optimizer(optimizer, model))
    for _ in range(3):
        step(model, optimizer, x)
        step(twin, other, x)
    expected = transform.apply(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11)


def tanh_network():
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    return nn.Sequential(*layers).double(), torch.randn(5, 4, dtype=torch.float64)


def normed_network(affine=False):
    torch.manual_seed(0)
    norm = nn.RMSNorm(8, elementwise_affine=affine)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2)).double(), torch.randn(5, 4, dtype=torch.float64)


def random_of(model, x):
    return ob.Transform.random(ob.symmetry(model, x, kinds="all"), torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimisers_follow_signs(name):
    model, x = tanh_network()
    transform = random_of(model, x)
    assert {basis.kind for basis in transform.symmetry.bases.values()} == {"signed"}
    assert not transform.is_permutation
    assert_commutes(model, x, transform, OPTIMIZERS[name])


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, dampening=0.3)])
@pytest.mark.parametrize("norm", [nn.RMSNorm(8, elementwise_affine=False), nn.LayerNorm(8, elementwise_affine=False)])
def test_momentum_follows_rotations(make, norm):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2)).double(), torch.randn(5, 4, dtype=torch.float64)
    transform = random_of(model, x)
    assert {basis.kind for basis in transform.symmetry.bases.values()} <= {"orthogonal", "centred"}
    assert_commutes(model, x, transform, make)


def test_momentum_follows_invertible_maps_that_happen_to_be_rotations():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(), torch.randn(5, 4, dtype=torch.float64)
    symmetry = ob.symmetry(model, x, kinds="all")
    (basis,) = symmetry.bases.values()
    assert basis.kind == "linear"
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    assert_commutes(model, x, ob.Transform(symmetry.random(), {}, {basis.name: rotation}), OPTIMIZERS["sgd"])
    stretched = ob.Transform(symmetry.random(), {}, {basis.name: 2 * rotation})
    with pytest.raises(ValueError, match="cannot follow maps that change lengths: gradients are divided"):
        assert_commutes(model, x, stretched, OPTIMIZERS["sgd"])


def test_entries_that_are_used_one_by_one_do_not_follow_rotations():
    for name in OPTIMIZERS.keys() - {"sgd"}:
        model, x = normed_network()
        with pytest.raises(ValueError, match=r"cannot follow a rotation: it is used entry by entry.*start .* anew"):
            assert_commutes(model, x, random_of(model, x), OPTIMIZERS[name])


def test_positive_scales_are_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)
    transform = ob.Transform.random(ob.symmetry(model, x, kinds="positive"))
    with pytest.raises(ValueError, match=r"'momentum_buffer' of '0.weight' cannot follow positive scales: gradients are"):
        assert_commutes(model, x, transform, OPTIMIZERS["sgd"])
    ones = ob.Transform(transform.permutation, {name: 0 * value for name, value in transform.logarithms.items()})
    assert_commutes(model.double(), x.double(), ones, OPTIMIZERS["adam"])


def test_gains_that_are_trained_do_not_follow_a_rotation():
    model, x = normed_network(affine=True)
    transform = random_of(model, x)
    assert transform.symmetry.fixed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with pytest.raises(ValueError, match=r"trains '1.weight', which has no counterpart in another basis"):
        transform.apply_optimizer(optimizer, model)
    model[1].weight.requires_grad_(False)
    assert_commutes(model, x, transform, lambda p: OPTIMIZERS["sgd"]([each for each in p if each.requires_grad]))


def test_gains_follow_signs():
    """A gain of one stays one where signs change; its moments stay as they are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Tanh(), nn.Linear(8, 2)).double(), tanh_network()[1]
    transform = random_of(model, x)
    assert {basis.kind for basis in transform.symmetry.bases.values()} == {"signed"}
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step(model, optimizer, x)
    moved = transform.apply_optimizer(optimizer, model)
    (name,) = transform.matrices
    index = transform.permutation[transform.symmetry.bases[name].group]
    assert torch.equal(moved["state"][2]["exp_avg"], optimizer.state_dict()["state"][2]["exp_avg"][index])


def test_unknown_entries_are_permuted_but_do_not_follow_signs():
    model, x = tanh_network()
    transform = random_of(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["secret"] = torch.randn_like(model[0].weight)
    with pytest.raises(ValueError, match=r"'secret' of '0.weight' cannot follow a change of sign: it is not known"):
        transform.apply_optimizer(optimizer, model)
    plain = ob.Transform(transform.permutation, {})
    assert torch.equal(
        plain.apply_optimizer(optimizer, model)["state"][0]["secret"],
        transform.permutation.apply_optimizer(optimizer, model)["state"][0]["secret"],
    )
