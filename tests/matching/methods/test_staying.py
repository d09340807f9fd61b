"""With scales to learn, a start that is given is learned from, and its permutation is not searched again."""

import torch
from torch import nn

import onebasin as ob

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
GOAL = {"data": [(X, torch.arange(32) % 2)], "objective": ob.Midpoint(nn.functional.cross_entropy), "kinds": "positive"}


def test_scales_are_learned_from_the_start_that_is_given():
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    start = ob.symmetry(a, X).random(torch.Generator().manual_seed(1))
    found = ob.align(b, to=a, init=start, scaling=ob.Scaling(steps=20), **GOAL)
    assert found.method == "given start"
    assert found.notes[0] == "given start was chosen: scales and bases are learned best from there."
    assert found.permutation == start
    assert found.cost < ob.align(b, to=a, init=start, scaling=ob.Scaling(steps=0), **GOAL).cost
    assert found.converged
