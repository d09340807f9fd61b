"""Scales of whole networks are found if they are asked for, and verified."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.verification import Different
from onebasin.tracing.degrees.rules import RULES


def mlp(activation):
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))


def test_tied_weights_have_one_degree():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.third.weight = self.second.weight

        def forward(self, x):
            return self.third(self.second(self.first(x).relu()).relu()).sum(-1)

    assert ob.symmetry(Tied(), torch.randn(5, 4), kinds="positive").scales == {}


def test_a_wrong_scale_is_found_by_verification(monkeypatch):
    monkeypatch.setitem(RULES, "tanh", RULES["relu"])
    with pytest.raises(Different, match=r"'0\.weight'"):
        ob.symmetry(mlp(nn.Tanh()), torch.randn(5, 4), kinds="positive")


def test_scales_are_found_only_if_asked_for():
    assert ob.symmetry(mlp(nn.ReLU()), torch.randn(5, 4)).scales == {}
    with pytest.raises(ValueError, match="kinds must be"):
        ob.symmetry(mlp(nn.ReLU()), torch.randn(5, 4), kinds="rotation")
