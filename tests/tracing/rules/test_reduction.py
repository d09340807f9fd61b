"""Reductions along any axis, also of scalars; where a position is read the axis is pinned."""

import pytest
import torch
from cases import check_groups
from torch.nn import functional as F

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
    (lambda self, x: self.last(self.first(x).flip(1)), []),
    (lambda self, x: torch.std_mean(self.last(self.first(x)), 1), [2, 8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
