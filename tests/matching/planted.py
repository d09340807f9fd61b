"""Networks with a planted permutation, and pairs without one."""

import copy

import torch
from torch import nn

import onebasin as ob

METHODS = ["sinkhorn", "weight-matching", "activation-matching", "ste"]


def planted(model: nn.Module, inputs, seed: int = 0):
    """A permuted copy, the symmetry, and the permutation that undoes it."""
    symmetry = ob.symmetry(model, inputs)
    permutation = symmetry.random(torch.Generator().manual_seed(seed))
    twin = copy.deepcopy(model)
    twin.load_state_dict(permutation.apply(model))
    return twin, symmetry, permutation.inverse()


def mlp(width: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


X, Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.randint(0, 2, (64,))


DATA = [(X[:32], Y[:32]), (X[32:], Y[32:])]


def pair():
    torch.manual_seed(5)
    a, b = mlp(), mlp()
    for p in b.parameters():
        nn.init.normal_(p, std=0.5)
    return a, b
