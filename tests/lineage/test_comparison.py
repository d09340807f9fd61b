"""What a comparison measures: changes up to symmetry, and whether a network is the same one."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.lineage.comparison import TESTS, Comparison
from onebasin.matching.problem import make_problem
from onebasin.relaxation.objectives import WeightDistance


def compare(change: float) -> Comparison:
    """A network with its permuted copy, every parameter of which was changed by a share of its norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    symmetry = ob.symmetry(model, torch.zeros(1, 16).double())
    copied = {}
    for key, value in symmetry.random().apply(model).items():
        noise = torch.randn_like(value)
        copied[key] = value + change * noise * value.norm() / noise.norm()
    problem = make_problem(copied, model.state_dict(), symmetry, WeightDistance(), None, lazily=True)
    comparison = Comparison(problem, 0.0, None, 0)
    comparison.run(look_for_copy=True)
    return comparison


def test_a_permuted_copy_is_the_same_network():
    comparison = compare(0.0)
    assert comparison.is_copy
    assert comparison.transform is not None
    assert max(comparison.changes.values()) < 1e-12


def test_a_change_is_measured_up_to_the_permutation():
    comparison = compare(0.05)
    assert not comparison.is_copy
    comparison.measure_derived(in_place=False)
    assert list(comparison.changes.values()) == pytest.approx([0.05] * 4, rel=1e-6)
    assert comparison.p_values()["residual"] < 1e-6


def test_each_test_has_a_p_value():
    comparison = compare(0.05)
    assert tuple(comparison.p_values()) == TESTS
    assert comparison.p_values()["order"] > 1e-4  # units do not stand in their places
    assert comparison.smallest_p_value() < 1e-6  # so many units that kinship could be shown
