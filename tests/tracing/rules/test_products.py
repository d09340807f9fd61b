"""Products and distances sum over axes that meet, and keep the others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, weight

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: torch.cdist(self.first(x), self.last.weight), [8]),
    (lambda self, x: torch.cdist(self.first(x)[None].expand(2, 3, 8), self.last.weight, p=1.0), [8]),
    (lambda self, x: torch.cdist(self.first(x).mT, self.last.weight.mT[:, :1].expand(8, 3)).sum(1) @ self.scale, [8, 8]),
    (lambda self, x: F.cosine_similarity(self.first(x)[:, None], self.last.weight, dim=-1), [8]),
    (lambda self, x: F.cosine_similarity(self.first(x), self.first(x + 1), dim=0) @ self.scale, [8]),
    (lambda self, x: F.pairwise_distance(self.first(x), self.scale, keepdim=True), [8]),
    (lambda self, x: torch.inner(self.first(x), self.last.weight), [8]),
    (lambda self, x: torch.inner(self.first(x).sum(), self.last(self.first(x))), [8]),
    (lambda self, x: torch.tensordot(self.first(x), self.last.weight, dims=([-1], [1])), [8]),
    (lambda self, x: torch.linalg.multi_dot([x, self.first.weight.mT, self.last.weight.mT]), [8]),
    (lambda self, x: torch.linalg.multi_dot([self.scale, self.first.weight, x.mT, x.sum(1)]), [8]),
    (lambda self, x: self.last(x.mean() * torch.kron(self.scale[:2], self.scale[4:])), [2, 4]),
    (lambda self, x: F.bilinear(self.first(x), self.first(x + 1), self.last.weight[:, None] * self.scale[:, None]), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


def written(model: nn.Module, inputs) -> list[tuple[int, ...]]:
    """Trace without verification, verify, and return the sizes of each group and its parents."""
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert symmetry.verify(model, inputs) < 1e-9
    return sorted((g.size, *(symmetry.sizes[parent] for parent in g.parents)) for g in symmetry.groups.values())


def test_bilinear_layers_have_a_group_per_axis():
    model = Fn(
        lambda self, x: self.last(self.both(self.one(x), self.other(x))),
        one=nn.Linear(4, 5),
        other=nn.Linear(4, 6),
        both=nn.Bilinear(5, 6, 7),
        last=nn.Linear(7, 2),
    )
    assert written(model, torch.rand(3, 4)) == [(5,), (6,), (7,)]


def test_centres_of_radial_units_move():
    model = Fn(
        lambda self, x: self.last(torch.exp(-torch.cdist(self.first(x), self.centres))),
        first=nn.Linear(4, 5),
        centres=weight(6, 5),
        last=nn.Linear(6, 2),
    )
    assert written(model, torch.rand(3, 4)) == [(5,), (6,)]


def test_axes_of_a_kronecker_product_are_pairs():
    model = Fn(lambda self, x: x @ torch.kron(self.a, self.b) @ self.out, a=weight(2, 3), b=weight(2, 4), out=weight(12, 2))
    assert written(model, torch.rand(3, 4)) == [(3,), (4,)]


def test_similarities_of_all_pairs_of_rows():
    """Coordinates that are compared across rows have one order in all of them."""
    model = Fn(
        lambda self, x: F.cosine_similarity(self.rows[:, None], self.rows[None], dim=-1).sin().sum() * x, rows=weight(5, 6)
    )
    assert written(model, torch.rand(3, 4)) == [(5,), (6,)]
