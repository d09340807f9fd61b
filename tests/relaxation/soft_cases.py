"""A softly permuted network beside a target, and how its tensors share products."""

import copy

import torch

import onebasin as ob
from onebasin.relaxation.objectives import parameter_keys
from onebasin.symmetries import mixing
from onebasin.tensors.states import read_state
from tests.networks import CASES


def case(name):
    """A source, a target and plans in float64, and the symmetry of both."""
    torch.manual_seed(0)
    model = CASES[name].make()
    symmetry = ob.symmetry(model, CASES[name].inputs(), verify=False)
    model = model.double()
    target = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn_like(parameter))
    net = ob.RebasinNet(model, symmetry, noise=1.0, generator=torch.Generator().manual_seed(0))
    return net, read_state(model), read_state(target), tuple(parameter_keys(model))


ALONE, BATCHED, JOINED = "each alone", "small ones together", "side by side, as on CUDA"


def arrange(how, monkeypatch):
    """Which tensors share products depends on their sizes and on the device: have it so for the tiny networks here."""
    monkeypatch.setattr(mixing, "_STACKED_NUMEL", {} if how == ALONE else {"cpu": 1 << 12})
    monkeypatch.setattr(mixing, "_JOINED_NUMEL", {"cpu": 1 << 12} if how == JOINED else {})
