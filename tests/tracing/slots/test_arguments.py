"""Operands that are zero, and operands that stand beside each other."""

import math

import pytest
import torch

import onebasin as ob
from tests.basis_networks import D, Function

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def kinds(between, verify=True):
    torch.manual_seed(0)
    symmetry = ob.symmetry(Function(between).eval(), X, kinds="all", verify=verify)
    return [basis.kind for basis in symmetry.bases.values()]


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        lambda x: x.new_zeros(D),
        lambda x: torch.zeros(D),
        lambda x: torch.zeros(1).to(x).expand(D),
        lambda x: torch.full((5, D), 0.0),
        lambda x: torch.tensor(0.0),
        lambda x: 0,
    ],
)
def test_zeros_change_nothing(make):
    assert kinds(lambda x: x + make(x)) == ["linear"]
    assert kinds(lambda x: torch.where(torch.arange(len(x))[:, None] > 1, make(x), x)) == ["linear"]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda x: x + torch.ones_like(x), ["centred"]),
        (lambda x: x + torch.ones(D), ["centred"]),
        (lambda x: torch.lerp(x, torch.full((5, D), 2.0).to(x), 0.3), ["centred"]),
        (lambda x: x + torch.arange(D), []),
        (lambda x: x + 1, []),
        (lambda x: (x + 1j).real, []),
    ],
)
def test_one_finite_number_for_all_units_keeps_their_mean(between, expected):
    assert kinds(between) == expected


@pytest.mark.parametrize(
    "between", [lambda x: x + torch.full_like(x, math.inf), lambda x: x + torch.full((D,), math.inf).to(x)]
)
def test_an_infinite_number_keeps_nothing(between):
    assert kinds(between, verify=False) == []
