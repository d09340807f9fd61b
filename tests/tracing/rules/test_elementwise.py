"""Elementwise operations on operands of every rank, and those with several results."""

import pytest
import torch
from torch.nn import functional as F

from tests.cases import check_groups

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(F.prelu(self.first(x), torch.tensor([0.5]))), [8]),
    (lambda self, x: self.last(F.prelu(self.first(x), self.scale)), [8]),
    (lambda self, x: F.prelu(self.last(self.first(x)).sum(), torch.tensor([0.5])), [2, 8]),
    (lambda self, x: F.glu(self.first(x)).sum(1), [4]),
    (lambda self, x: self.last(torch.frexp(self.first(x)).mantissa), [8]),
    (lambda self, x: self.last(self.first(x) + self.last.bias.sum()), [8]),
    (lambda self, x: self.last(self.first(x)[:0]) + self.last(self.first(x)).sum(), [8]),
    (lambda self, x: self.last(self.first(x).masked_fill(x[:, :1] > 0, 2.0)), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
