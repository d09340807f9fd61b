"""Norms carry their channels, whatever the rank of their weights."""

import pytest
import torch
from cases import check_groups
from torch.nn import functional as F

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(F.layer_norm(self.first(x), (8,), self.scale)), [8]),
    (lambda self, x: self.last(F.layer_norm(self.first(x), (3, 8))), [8]),
    (lambda self, x: F.linear(torch._weight_norm(self.first.weight, self.first.weight.norm(), -1), x).mT @ self.scale, [8]),
    (lambda self, x: self.last(F.rms_norm(self.first(x), (8,))), [8]),
    (lambda self, x: self.last(F.instance_norm(self.first(x)[:, :, None].repeat(1, 1, 4)).sum(2)), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
