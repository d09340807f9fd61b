"""Norms carry their channels, whatever the rank of their weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, weight

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


def test_groups_across_a_concatenation_leave_blocks_free():
    """Groups of 4 over 6 + 10 channels: the second has 2 of each. Blocks of 2 stay, and the channels in them move."""

    def forward(self, x):
        return self.last(F.group_norm(torch.cat([self.first(x), self.second(x)], 1), 4))

    model = Fn(forward, first=nn.Linear(4, 6), second=nn.Linear(4, 10), last=nn.Linear(16, 2))
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    families = [(group.size, *(symmetry.sizes[parent] for parent in group.parents)) for group in symmetry.groups.values()]
    assert sorted(families) == [(2, 3), (2, 5)]
    assert symmetry.num_free == 16
    assert symmetry.verify(model, torch.rand(3, 4)) < 1e-9


@pytest.mark.parametrize(("num_groups", "sizes"), [(3, [2, 2, 4, 4]), (2, [6, 6]), (12, [6, 6])])
def test_zeros_are_the_same_in_each_group_alone(num_groups, sizes):
    """Six units and six zeros: in groups of 4, two of the zeros are normalised with two of the units."""

    def forward(self, x):
        padded = torch.cat([self.first(x), torch.zeros(3, 6)], 1)
        return F.group_norm(padded, num_groups, self.scale, self.shift, eps=0.1) @ self.last

    members = {"scale": weight(12), "shift": weight(12), "last": weight(12, 2)}
    model = Fn(forward, first=nn.Linear(4, 6), **members)
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == sizes
    assert symmetry.verify(model, torch.rand(3, 4)) < 1e-9


def test_groups_without_common_blocks_are_cut_at_their_ends():
    """Groups of 7 over 5 + 9 channels: the second has 2 of the first group."""

    def forward(self, x):
        return self.last(F.group_norm(torch.cat([self.first(x), self.second(x)], 1), 2))

    model = Fn(forward, first=nn.Linear(4, 5), second=nn.Linear(4, 9), last=nn.Linear(14, 2))
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == [2, 5, 7]
    assert symmetry.verify(model, torch.rand(3, 4)) < 1e-9


@pytest.mark.parametrize("repeat", [lambda h: h.repeat_interleave(3, 1), lambda h: F.pad(h, (6, 2))])
def test_equal_channels_in_different_groups_become_different(repeat):
    """Channels repeated in threes, or zeros beside others, in groups that hold parts of them."""

    def forward(self, x):
        return self.last(F.group_norm(repeat(self.first(x)), 3))

    torch.manual_seed(0)
    model = Fn(forward, first=nn.Linear(4, 4), last=nn.Linear(12, 2))
    assert ob.symmetry(model, torch.rand(3, 4), verify=False).verify(model, torch.rand(3, 4)) < 1e-9
