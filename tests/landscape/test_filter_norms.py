"""Filters of a mixed network get the interpolated norms of their parents', without data."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.landscape.calibration import repair
from onebasin.landscape.filter_norms import keep_norms
from onebasin.tensors.states import read_state
from tests.landscape.plain_networks import batches, cnn, load, mix, mlp
from tests.networks import Fn


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75), (1.0, 0.0)])
@pytest.mark.parametrize("norm", [False, True])
def test_norms_are_interpolated_and_the_rest_stays(weights, norm):
    a, b = cnn(0, norm=norm), cnn(1, norm=norm)
    mixed = mix(a, b, weights)
    found = repair(mixed, [a, b], None, ob.symmetry(a, batches(1, 6, 6)[0]), weights, form="norms")
    hidden = [f"{path}.weight" for path in found.repaired]
    assert hidden
    for key, value in mixed.state_dict().items():
        if key in hidden:
            norms = [model.state_dict()[key].flatten(1).norm(dim=1) for model in (a, b)]
            torch.testing.assert_close(
                found.state[key].flatten(1).norm(dim=1), weights[0] * norms[0] + weights[1] * norms[1]
            )
        else:
            torch.testing.assert_close(found.state[key], value)


def test_equal_parents_stay_as_they_are():
    a = mlp(0)
    found = repair(a, [a, copy.deepcopy(a)], None, ob.symmetry(a, batches(4)[0]), form="norms")
    torch.testing.assert_close(load(a, found.state)(batches(4)[0]), a(batches(4)[0]))


def test_a_filter_that_cancels_out_stays_zero():
    a = nn.Linear(3, 2)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.weight.neg_()
    mixed = read_state(mix(a, b))
    assert bool((keep_norms(mixed, [read_state(a), read_state(b)], (0.5, 0.5), [""])["weight"] == 0).all())


def test_a_network_without_filters_is_refused():
    model = Fn(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(4, dtype=torch.float64)))
    with pytest.raises(ValueError, match="no layer to repair"):
        repair(model, [model, model], None, ob.symmetry(model, batches(4)[0]), form="norms")
