"""What an alignment did to the end that it moved is measured in float64, beside the condition of its bases."""

import copy
import math

import pytest
import torch
from torch import nn

import onebasin as ob
from experiments.kept_functions import measure_change, measure_end


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()


@pytest.mark.parametrize("kinds", ["permutation", "all"])
def test_the_function_is_kept(kinds):
    target, source = make(0), make(1)
    x = torch.randn(8, 3)
    found = ob.align(source, target, x, method="weight-matching", kinds=kinds)
    end = measure_end(source, found, x)
    assert end["change"] < 1e-5
    assert end["change in float64"] < 1e-13
    if kinds == "permutation":
        assert end["condition"] == 1
    else:
        ((_, matrix),) = found.matrices.items()
        assert end["condition"] == pytest.approx(float(torch.linalg.cond(matrix)))
        assert end["condition"] > 1.01
    assert measure_end(source, None, x) == {"change": 0, "change in float64": 0, "condition": 1}


def test_a_changed_function_is_seen():
    before = make(0)
    after = copy.deepcopy(before)
    with torch.no_grad():
        after[3].weight.mul_(1.5)
        after[3].bias.mul_(1.5)
    assert math.isclose(measure_change(before, after, torch.randn(8, 3)), 0.5, rel_tol=1e-5)
