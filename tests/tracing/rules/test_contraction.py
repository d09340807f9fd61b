"""Products of every rank; an equation may repeat a letter or leave the result out."""

import pytest
import torch
from torch.nn import functional as F

from tests.cases import check_groups

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: F.linear(self.first(x), self.scale), [8]),
    (lambda self, x: self.first(x) @ self.scale, [8]),
    (lambda self, x: torch.einsum("bi,oi", self.first(x), self.last.weight), [8]),
    (lambda self, x: torch.einsum("...i,...i->...", self.first(x), self.scale), [8]),
    (lambda self, x: torch.einsum("ii->i", self.first(x)[:, :3]).sum() + self.last(self.first(x)), [5]),
    (lambda self, x: torch.addmm(self.last.bias, self.first(x), self.last.weight.t()), [8]),
    (lambda self, x: torch.addmm(torch.ones(1, 1), self.first(x), self.last.weight.t()), [8]),
    (lambda self, x: self.first(x) @ torch.outer(self.scale, self.last.bias), [8]),
    (lambda self, x: torch.dot(self.scale, self.first.bias) + self.last(self.first(x)), [8]),
    (lambda self, x: torch.mv(self.first(x), self.scale), [8]),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
