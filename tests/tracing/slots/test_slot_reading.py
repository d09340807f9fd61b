"""What a reading does with operations that it has no rule for."""

import torch
from torch import nn

import onebasin as ob


class Unknown(nn.Module):
    """Something that no rule is about stands between two of three linear maps."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.third(torch.expm1(self.second(self.first(x))))


def test_an_operation_without_a_rule_forbids_what_it_reads_and_nothing_else():
    symmetry = ob.symmetry(Unknown(), torch.randn(2, 3), kinds="all")
    assert [basis.name for basis in symmetry.bases.values()] == ["first.weight"]
    assert not symmetry.scales


def test_outputs_stay_as_they_are():
    symmetry = ob.symmetry(nn.Linear(3, 4), torch.randn(2, 3), kinds="all")
    assert not symmetry.bases
    assert not symmetry.scales
