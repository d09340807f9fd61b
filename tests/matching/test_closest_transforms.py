"""Scales and invertible matrices in closed form: planted ones are undone exactly, alone and together."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching import transform_steps
from onebasin.matching.closest_scales import Term, closest_logarithms
from onebasin.tensors.states import LazyState
from tests.basis_networks import MLP, Attention, D, Model, RMSNorm


def test_closest_logarithms_are_the_lowest_of_a_grid():
    torch.manual_seed(0)
    square, product = torch.rand(2, 2, 50, dtype=torch.float64)
    terms = {1.0: Term(square[0], product[0]), -1.0: Term(square[1], product[1])}
    found = closest_logarithms(terms)
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)[:, None]
    costs = sum(t.square * (2 * p * grid).exp() - 2 * t.product * (p * grid).exp() for p, t in terms.items())
    torch.testing.assert_close(found, grid[costs.argmin(0), 0], atol=1e-3, rtol=0)


def test_units_that_point_apart_do_not_vanish():
    """The smaller the closer: there is no best scale, and none beyond the limit."""
    terms = {1.0: Term(torch.ones(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64))}
    assert closest_logarithms(terms).tolist() == [-3.0]


def make_mlp():
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)), torch.randn(2, 6)


def make_cnn():
    layers = (nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), torch.randn(2, 2, 8, 8)


class Gated(nn.Module):
    """A gate whose other branch can be scaled."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(D, 24), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def make_transformer():
    model = Model([Attention(rotate="halves"), Gated(), Attention(), MLP()], [RMSNorm(D) for _ in range(5)])
    model.embed, model.head = nn.Embedding(40, D), nn.Linear(D, 40)
    return model, torch.randint(0, 40, (2, 5))


def train(model: nn.Module, x: torch.Tensor) -> None:
    """A few large steps, so that nothing is as it was drawn; gains of norms stay one, and a change of basis needs that."""
    params = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.Adam(params, lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("make", [make_mlp, make_cnn, make_transformer])
def test_planted_transforms_of_every_kind_are_undone(make, trained):
    torch.manual_seed(0)
    model, x = make()
    if trained:
        train(model.train(), x)
    model, x = model.double().eval(), x.double() if x.is_floating_point() else x
    symmetry = ob.symmetry(model, x, kinds="all")
    assert symmetry.scales
    planted = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    moved = copy.deepcopy(model)
    moved.load_state_dict(planted.apply(model))
    found = ob.align(
        moved, to=model, symmetry=symmetry, method="weight-matching", detect_copy=False, scaling=ob.Scaling(steps=0)
    )
    assert found.start_cost > 1
    size = sum(float(p.detach().square().sum()) for p in model.parameters())
    assert found.cost < 1e-12 * size  # the weights agree to 1e-6
    assert len([entry for entry in found.history if "sweep" in entry]) == 1


@pytest.mark.parametrize("held", [10**8, 0])
def test_lazy_states_are_read_tensor_by_tensor(held, monkeypatch):
    monkeypatch.setattr(transform_steps, "_HELD_ENTRIES", held)
    torch.manual_seed(0)
    model, x = make_transformer()
    model = model.double().eval()
    symmetry = ob.symmetry(model, x, kinds="all")
    target = model.state_dict()
    source = ob.Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(target)

    reads: Counter[str] = Counter()

    def lazily(state):
        def read(key):
            reads[key] += state is source
            return state[key]

        return LazyState({key: value.to("meta") for key, value in state.items()}, read)

    options = {"symmetry": symmetry, "method": "weight-matching", "detect_copy": False, "scaling": ob.Scaling(steps=0)}
    found = ob.align(lazily(source), to=lazily(target), **options)
    assert isinstance(found.model, LazyState)
    # The cost before and after, twice each, once more without scales, and once or twice to decide its groups.
    assert held == 0 or max(count for key, count in reads.items() if key not in symmetry.fixed) <= 7, reads
    assert [entry["sweep"] for entry in found.history if "sweep" in entry] == [0]
    for key, value in target.items():
        torch.testing.assert_close(found.model[key], value, rtol=1e-6, atol=1e-6)
