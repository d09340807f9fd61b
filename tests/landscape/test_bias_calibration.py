"""Biases of a chain of layers, calibrated without data."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.landscape.calibration import repair
from tests.landscape.plain_networks import batches, cnn, load, mix, mlp
from tests.networks import Fn


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75), (1.0, 0.0)])
def test_biases_shrink_with_depth(weights):
    a, b = mlp(0), mlp(1)
    found = repair(mix(a, b, weights), [a, b], None, ob.symmetry(a, batches(4)[0]), weights, form="bias")
    assert found.repaired == ("0", "2", "4", "6")
    for depth, layer in enumerate((0, 2, 4, 6), start=1):
        expected = weights[0] ** depth * a[layer].bias + weights[1] ** depth * b[layer].bias
        torch.testing.assert_close(found.state[f"{layer}.bias"], expected.detach())
        torch.testing.assert_close(found.state[f"{layer}.weight"], mix(a, b, weights)[layer].weight)


def test_calibrated_biases_are_exact_for_unrelated_endpoints():
    """Endpoints that use disjoint units and inputs: between them each passes on a half per layer, and so do their biases."""
    full = mlp(0)
    a, b = copy.deepcopy(full), copy.deepcopy(full)
    with torch.no_grad():
        for model, units in ((a, slice(0, 3)), (b, slice(3, 6))):
            kept = copy.deepcopy(model)
            for layer in (0, 2, 4):
                model[layer].weight.zero_()
                model[layer].bias.zero_()
                inputs = slice(None) if layer == 0 else units
                model[layer].weight[units, inputs] = kept[layer].weight[units, inputs]
                model[layer].bias[units] = kept[layer].bias[units]
            model[1], model[6].weight[:, [u for u in range(6) if u not in range(6)[units]]] = nn.ReLU(), 0
    x = batches(4)[0]
    found = repair(mix(a, b), [a, b], None, ob.symmetry(a, x), form="bias")
    torch.testing.assert_close(load(a, found.state)(x), (a(x) + b(x)).detach() / 16)


def residual() -> nn.Module:
    layers = {"first": nn.Linear(4, 5), "inner": nn.Linear(5, 5), "last": nn.Linear(5, 2)}
    return Fn(lambda m, x: m.last((h := m.first(x).relu()) + m.inner(h).relu()), **layers).double()


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [(lambda: cnn(0, norm=True), (1, 6, 6), "without norms"), (residual, (4,), "a chain")],
)
def test_biases_are_calibrated_on_chains_alone(model, shape, message):
    model, inputs = model(), batches(*shape)[0]
    with pytest.raises(ValueError, match=message):
        repair(model, [model, model], None, ob.symmetry(model, inputs), form="bias")


def test_the_module_in_the_way_is_named():
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.Sequential(nn.Linear(3, 8), attention, nn.Linear(8, 2)).double(), torch.randn(2, 4, 3).double()
    with pytest.raises(ValueError, match=r"without norms, and '1\.norm1' is one"):
        repair(model, [model, model], None, ob.symmetry(model, x), form="bias")
    gru = nn.GRU(3, 4, batch_first=True).double()
    with pytest.raises(ValueError, match=r"a chain of linear .* and this network has 'weight_ih_l0'"):
        repair(gru, [gru, gru], None, ob.symmetry(gru, x), form="bias")
