"""Products of every rank; an equation may repeat a letter or leave the result out."""

import pytest
import torch
from cases import two_layers, weight
from torch.nn import functional as F

import onebasin as ob

# A forward, and the sizes of the groups that a person counts. They are traced without verification, and then verified.
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


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # few of them use all parameters
@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    model, inputs = two_layers(forward, scale=weight(8)), torch.rand(3, 4)
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == sorted(sizes)
    assert symmetry.verify(model, inputs) < 1e-9
