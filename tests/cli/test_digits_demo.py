"""The parts of the demo: its networks learn, and what it prints of the symmetry is true."""

import re

import torch
from torch.nn import functional as F

import onebasin as ob
from onebasin.cli.digits_demo import ResidualCNN, make_mlp, show_symmetry, train
from onebasin.datasets import digits


def test_its_network_learns_the_digits():
    images, labels = digits("train")
    torch.manual_seed(0)
    model = make_mlp()
    before = float(F.cross_entropy(model(images), labels).detach())
    assert train(model, images, labels, seed=0, epochs=3) is model
    assert not model.training
    assert float(F.cross_entropy(model(images), labels).detach()) < before / 2


def test_the_shortcut_ties_the_stem_to_the_second_convolution():
    symmetry = ob.symmetry(ResidualCNN(), torch.rand(2, 1, 8, 8))
    assert sorted(group.size for group in symmetry.groups.values()) == [16, 32]


def test_it_shows_that_weights_move_and_outputs_do_not(capsys):
    show_symmetry()
    weights, outputs = re.findall(
        r"moved the weights by ([\d.]+) .* outputs by at most ([\de.-]+)\.\n", capsys.readouterr().out
    )[0]
    assert float(weights) > 1
    assert float(outputs) < 1e-12
