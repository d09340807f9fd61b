"""Numbers about transforms that can be computed by hand."""

import math

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.transform_sizes import count_kinds, measure_bases, measure_scales


def test_a_rotation_has_its_distance_and_no_stretch():
    model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 2))
    symmetry = ob.symmetry(model, torch.zeros(1, 4), kinds="all")
    (name,) = symmetry.bases
    turned = torch.eye(8, dtype=torch.float64)
    turned[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    (size,) = measure_bases(ob.Transform(symmetry.random(), {}, {name: turned}))
    assert (size.name, size.kind, size.size, size.num_members) == (name, "orthogonal", 8, 1)
    assert size.distance == pytest.approx(math.sqrt(4 / 8))  # two rows of norm root two
    assert size.condition == 1
    (size,) = measure_bases(ob.Transform(symmetry.random(), {}, {name: torch.eye(8)}))
    assert size.distance == 0


def test_signs_count_as_a_diagonal():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    symmetry = ob.symmetry(model, torch.zeros(1, 4), kinds="all")
    (name,) = symmetry.bases
    signs = torch.ones(8)
    signs[:2] = -1
    transform = ob.Transform(symmetry.identity(), {}, {name: signs})
    (size,) = measure_bases(transform)
    assert (size.kind, size.distance, size.condition) == ("signed", pytest.approx(2 * math.sqrt(2 / 8)), 1)
    assert count_kinds(transform) == {"signed": 1}


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_members_of_a_family_are_counted_and_the_worst_condition_is_told():
    symmetry = ob.symmetry(Heads(), torch.zeros(1, 3, 8), kinds="all")
    matrices = {name: torch.eye(4, dtype=torch.float64).repeat(2, 1, 1) for name in symmetry.bases}
    first = next(iter(matrices))
    matrices[first][1, 0, 0] = 5
    sizes = {size.name: size for size in measure_bases(ob.Transform(symmetry.identity(), {}, matrices))}
    assert {(size.size, size.num_members) for size in sizes.values()} == {(4, 2)}
    assert sizes[first].condition == pytest.approx(5)
    assert sizes[first].distance == pytest.approx(4 / math.sqrt(8))


def test_scales_have_the_range_of_their_factors():
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4), kinds="positive")
    (name,) = symmetry.scales
    logarithms = {name: torch.tensor([2.0, 1.0, 0.5]).log()}
    (size,) = measure_scales(ob.Transform(symmetry.identity(), logarithms))
    assert (size.name, size.size, size.num_members) == (name, 3, 1)
    assert (size.lowest, size.highest) == (pytest.approx(0.5), pytest.approx(2))
    assert measure_bases(ob.Transform(symmetry.identity(), logarithms)) == []
