from dataclasses import replace

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries.file_checks import check_loaded, check_sizes


@pytest.fixture
def symmetry():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    return ob.symmetry(model, torch.zeros(1, 3), kinds="all")


def test_what_was_traced_is_taken(symmetry):
    check_loaded(symmetry, check_sizes(symmetry.sizes))


@pytest.mark.parametrize("sizes", [None, [4], {"h": 0}, {"h": -1}, {"h": 2.0}, {"h": True}, {"h": "4"}])
def test_sizes_that_are_none(sizes):
    with pytest.raises(ValueError, match="must be whole numbers above zero"):
        check_sizes(sizes)


def test_contradictions(symmetry):
    with pytest.raises(ValueError, match=r"the group '0.weight' has size 4, and its size is listed as None"):
        check_loaded(symmetry, {})
    with pytest.raises(ValueError, match="the tied tensor 'none' has no layout"):
        check_loaded(replace(symmetry, ties=(("none",),)), symmetry.sizes)
    (scale,), (basis,) = symmetry.scales.values(), symmetry.bases.values()
    for changed, message in (
        ({"none": scale.powers["0.weight"]}, "'none' is scaled or mixed, and has no layout"),
        ({"0.weight": (scale.powers["0.weight"][0]._replace(axis=2),)}, "axis 2 of '0.weight' is scaled or mixed"),
        ({"0.weight": (scale.powers["0.weight"][0]._replace(axis=-2),)}, "axis -2 of '0.weight' is scaled or mixed"),
        ({"0.weight": (scale.powers["0.weight"][0]._replace(number=1),)}, "does not hold '0.weight' so often"),
        ({"0.weight": (scale.powers["0.weight"][0]._replace(exponent=torch.inf),)}, "has the power inf"),
    ):
        wrong = {scale.name: replace(scale, powers=changed)}
        with pytest.raises(ValueError, match=message):
            check_loaded(replace(symmetry, scales=wrong), symmetry.sizes)
    wrong = {basis.name: replace(basis, places={"0.weight": basis.places["2.weight"]})}
    with pytest.raises(ValueError, match=r"does not hold '2.weight' so often"):
        check_loaded(replace(symmetry, bases=wrong), symmetry.sizes)
