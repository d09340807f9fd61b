"""Indices pin the axis that they select along, and no other."""

import pytest
import torch

from tests.cases import check_groups

# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: self.last(self.first(x)[torch.tensor([2, 0])]), [8]),
    (lambda self, x: self.last(self.first(x)[:, torch.arange(8)]), []),
    (lambda self, x: self.last(self.first(x) * self.first(x)[:, [3]]), [3, 4]),
    (lambda self, x: self.last(self.first(x) * self.first(x)[:, [-8]]), [7]),
    (lambda self, x: self.last(self.first(x) * self.first(x)[[-1]]), [8]),
    (lambda self, x: self.last(self.first(x) * self.first(x)[:, [-1, 0]].sum()), []),
    (lambda self, x: self.last(self.first(x) * self.first(x)[[1], [2]]), []),
    (lambda self, x: self.last(self.first(x).index_select(0, torch.tensor(1))), [8]),
    (lambda self, x: self.last(self.first(x).gather(0, torch.zeros(1, 8).long())), [8]),
    (lambda self, x: self.last(self.first(x).gather(1, torch.arange(8).expand(3, 8))), []),
    (lambda self, x: self.last(self.first(x).take_along_dim(torch.arange(8)[None], 1)), []),
    (lambda self, x: self.last(self.first(x).take_along_dim(torch.tensor([[2], [0]]), 0)), [8]),
    (lambda self, x: self.last(self.first(x)[None].take_along_dim(torch.tensor([2, 0]).view(2, 1, 1), 1)), [8]),
    (lambda self, x: self.last(self.first(x).take_along_dim(torch.randint(3, (2, 8)), 0)), []),
    (lambda self, x: self.last(self.first(x).take_along_dim(torch.arange(24)).view(3, 8)), []),
    (lambda self, x: self.last(self.first(x).repeat_interleave(torch.tensor([1, 2, 1]), 0, output_size=4)), []),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)
