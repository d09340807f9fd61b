"""Reductions along any axis, also of scalars; where a position is read the axis is pinned."""

import pytest
import torch
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, weight

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(self.first(x)) * self.first(x).max(1, keepdim=True).values, [8]),
    (lambda self, x: self.last(self.first(x)) * self.first(x).max(1, keepdim=True).indices, []),
    (lambda self, x: self.last(self.first(x)) * self.first(x).kthvalue(2, 1, keepdim=True).values, []),
    (lambda self, x: self.last(self.first(x).kthvalue(2, 0).values), [8]),
    (lambda self, x: self.last(self.first(x).view(3, 2, 4).kthvalue(2, 1).values.repeat(1, 2)), [4, 2]),
    (lambda self, x: self.last(self.first(x)).mean().squeeze(0).sort().values.cumsum(0), [2, 8]),
    (lambda self, x: self.last(self.first(x)) + self.first(x).mean().argmax(), [8]),
    (lambda self, x: self.last(self.first(x).softmax(1)) + self.first(x).sum().softmax(0), [8]),
    (lambda self, x: self.last(F.pad(self.first(x).sum(1, keepdim=True), (3, 4))), [8]),  # what meets zeros only is not free
    (lambda self, x: self.last(F.pad(self.first(x)[:, :0], (4, 4))), []),
    (lambda self, x: self.last(F.max_pool1d(self.first(x).unsqueeze(1), 3, 1, 1).squeeze(1)), []),
    (lambda self, x: self.last(self.first(x).roll(1, 0)), [8]),
    (lambda self, x: self.last(self.first(x)) * F.mse_loss(self.first(x), self.scale.expand(3, 8)), [8]),
    (lambda self, x: self.last(F.smooth_l1_loss(self.first(x), self.first(x).flip(0), reduction="none")), [8]),
    (lambda self, x: self.last(self.first(x)) * F.l1_loss(self.first(x), torch.arange(24.0).view(3, 8)), []),
    (lambda self, x: self.last(self.first(x).flip(1)), []),
    (lambda self, x: self.last(self.first(x)) * torch.linalg.norm(self.first(x)), [8]),
    (lambda self, x: self.last(self.first(x)) * torch.linalg.norm(self.first(x), 2), [8]),
    (lambda self, x: self.last(self.first(x)) * torch.linalg.norm(self.first(x), 1, (0, 1)), [8]),
    (lambda self, x: self.last(self.first(x) / torch.linalg.norm(self.first.weight, dim=1)), [8]),
    (lambda self, x: self.last(self.first(x)) * torch.linalg.matrix_norm(self.first(x), "nuc"), [8]),
    (lambda self, x: self.last(torch.aminmax(self.first(x), dim=0).max), [8]),
    (lambda self, x: self.last(self.first(x)) * torch.aminmax(self.first(x)).min, [8]),
    (lambda self, x: torch.std_mean(self.last(self.first(x)), 1), [2, 8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


def test_a_matrix_norm_has_rows_and_columns_that_move_independently():
    """The largest singular value is not that of a matrix whose rows have their own orders of columns."""
    model = Fn(lambda self, x: x * torch.linalg.norm(self.table, 2), table=weight(3, 4))
    symmetry = ob.symmetry(model, torch.rand(2), verify=False)
    assert sorted((group.size, group.parents) for group in symmetry.groups.values()) == [(3, ()), (4, ())]
    assert symmetry.verify(model, torch.rand(2)) < 1e-9
