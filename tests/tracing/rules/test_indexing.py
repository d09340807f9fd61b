"""Indices pin the axis that they select along, and no other."""

import pytest
import torch
from cases import two_layers, weight

import onebasin as ob

# A forward, and the sizes of the groups that a person counts. They are traced without verification, and then verified.
CASES = [
    (lambda self, x: self.last(self.first(x)[torch.tensor([2, 0])]), [8]),
    (lambda self, x: self.last(self.first(x)[:, torch.arange(8)]), []),
    (lambda self, x: self.last(self.first(x).index_select(0, torch.tensor(1))), [8]),
    (lambda self, x: self.last(self.first(x).gather(0, torch.zeros(1, 8).long())), [8]),
    (lambda self, x: self.last(self.first(x).gather(1, torch.arange(8).expand(3, 8))), []),
    (lambda self, x: self.last(self.first(x).take_along_dim(torch.arange(8)[None], 1)), []),
    (lambda self, x: self.last(self.first(x).repeat_interleave(torch.tensor([1, 2, 1]), 0, output_size=4)), []),
]


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # few of them use all parameters
@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    model, inputs = two_layers(forward, scale=weight(8)), torch.rand(3, 4)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == sorted(sizes)
    assert symmetry.verify(model, inputs) < 1e-9
