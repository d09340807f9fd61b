"""Transforms form a group that acts on states, and are kept in files."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries import Transform
from onebasin.symmetries.transform import TransformedSymmetry


class Heads(nn.Module):
    """A family of scales: one number for each unit of each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def cnn():
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


NETWORKS = {"cnn": (cnn, (3, 2, 6, 6)), "heads": (Heads, (2, 3, 8))}


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    make, shape = NETWORKS[request.param]
    model, x = make().double().eval(), torch.randn(shape, dtype=torch.float64)
    return model, x, ob.symmetry(model, x, kinds="positive")


def run(model, state, x):
    return torch.func.functional_call(model, state, (x,))


def test_the_function_stays(case):
    model, x, symmetry = case
    moved = Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(model)
    assert any(not torch.equal(moved[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(run(model, moved, x), model(x), rtol=1e-9, atol=1e-11)


def test_products_and_inverses(case):
    model, _, symmetry = case
    first, second = (Transform.random(symmetry, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    both, stepwise = (first @ second).apply(model), first.apply(second.apply(model))
    back = first.inverse().apply(first.apply(model))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(both[key], stepwise[key])
        torch.testing.assert_close(back[key], value)
    assert not first.is_identity
    assert Transform(symmetry.identity(), {}).is_identity


def test_files(case, tmp_path):
    model, _, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    transform.save(tmp_path / "t.safetensors")
    loaded = Transform.load(tmp_path / "t.safetensors")
    assert repr(loaded) == repr(transform)
    for key, value in transform.apply(model).items():
        torch.testing.assert_close(loaded.apply(model)[key], value)
    transform.permutation.save(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match="not a onebasin transform"):
        Transform.load(tmp_path / "p.safetensors")
    with pytest.raises(ValueError, match="not a onebasin permutation"):
        ob.Permutation.load(tmp_path / "t.safetensors")


def test_one_group_alone(case):
    model, x, symmetry = case
    transform = Transform.random(symmetry, torch.Generator().manual_seed(1))
    name = symmetry.scales[next(iter(symmetry.scales))].group
    torch.testing.assert_close(run(model, transform.only(name).apply(model), x), model(x), rtol=1e-9, atol=1e-11)


def test_scales_that_do_not_fit_are_refused(case):
    _, _, symmetry = case
    name = next(iter(symmetry.scales))
    with pytest.raises(ValueError, match="has no scale 'x'"):
        Transform(symmetry.identity(), {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="has shape"):
        Transform(symmetry.identity(), {name: torch.zeros(99)})
    shape = Transform.random(symmetry).logarithms[name].shape
    with pytest.raises(ValueError, match="not finite"):
        Transform(symmetry.identity(), {name: torch.full(shape, float("nan"))})


def test_verification_allows_for_rounding_where_units_are_mixed():
    """An output that is zero because numbers cancel out does not stay zero in another basis."""
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2)), torch.randn(4, 3)
    symmetry = ob.symmetry(model, x, kinds="all")
    assert symmetry.rounding == 0
    assert TransformedSymmetry(symmetry).rounding == 1e-12
    assert TransformedSymmetry(ob.symmetry(model, x, kinds="positive")).rounding == 0
