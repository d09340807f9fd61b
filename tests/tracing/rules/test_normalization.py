"""Norms carry their channels, whatever the rank of their weights."""

import pytest
import torch
from cases import two_layers, weight
from torch.nn import functional as F

import onebasin as ob

# A forward, and the sizes of the groups that a person counts. They are traced without verification, and then verified.
CASES = [
    (lambda self, x: self.last(F.layer_norm(self.first(x), (8,), self.scale)), [8]),
    (lambda self, x: self.last(F.layer_norm(self.first(x), (3, 8))), [8]),
    (lambda self, x: F.linear(torch._weight_norm(self.first.weight, self.first.weight.norm(), -1), x).mT @ self.scale, [8]),
    (lambda self, x: self.last(F.rms_norm(self.first(x), (8,))), [8]),
    (lambda self, x: self.last(F.instance_norm(self.first(x)[:, :, None].repeat(1, 1, 4)).sum(2)), [8]),
]


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # few of them use all parameters
@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    model, inputs = two_layers(forward, scale=weight(8)), torch.rand(3, 4)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == sorted(sizes)
    assert symmetry.verify(model, inputs) < 1e-9
