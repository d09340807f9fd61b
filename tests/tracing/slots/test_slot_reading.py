"""What a reading does with operations that it has no rule for."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.basis_networks import Function
from tests.cases import Fn


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.int64).to(x.dtype),
        lambda x: x.bool().to(x.dtype),
        lambda x: x.type_as(torch.zeros(1, dtype=torch.int32)).to(x.dtype),
        lambda x: x.sum(0, keepdim=True, dtype=torch.int64).to(x.dtype) + 0 * x,
    ],
)
@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_nothing_passes_through_whole_numbers(function, kinds):
    symmetry = ob.symmetry(Function(function), torch.randn(5, 3), verify=False, kinds=kinds)
    assert not symmetry.bases
    assert not symmetry.scales


@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_parameters_of_whole_numbers_are_permuted_and_no_more(kinds):
    first = nn.Parameter(torch.randint(-5, 5, (4, 3)), requires_grad=False)
    model = Fn(lambda self, x: self.second(x @ self.first.to(x).mT), first=first, second=nn.Linear(4, 2))
    symmetry = ob.symmetry(model, torch.randn(2, 3), kinds=kinds)
    assert list(symmetry.groups) == ["first"]
    assert not symmetry.bases
    assert not symmetry.scales


def test_outputs_stay_as_they_are():
    symmetry = ob.symmetry(nn.Linear(3, 4), torch.randn(2, 3), kinds="all")
    assert not symmetry.bases
    assert not symmetry.scales
