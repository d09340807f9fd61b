"""The networks of the published recipes that are part of the repository."""

import torch

import onebasin as ob
from experiments.anchor_networks import RECIPES, STORED, trained_networks


def test_stored_networks_need_no_training(tmp_path, monkeypatch):
    """No data is at hand here, so a network that had to be trained would fail."""
    monkeypatch.chdir(tmp_path)
    networks = trained_networks(RECIPES["resnet20-long"], [0, 1, 2], "cpu", run=2)
    assert len(list(STORED.glob("*.safetensors"))) == len(networks) == 3
    x = torch.randn(4, 3, 32, 32)
    first, second, third = (network(x) for network in networks)
    assert first.dtype == torch.float32
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)


def test_their_symmetry_holds_on_trained_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (network,) = trained_networks(RECIPES["resnet20-long"], [0], "cpu", run=2)
    network, x = network.double(), torch.randn(4, 3, 32, 32).double()
    symmetry = ob.symmetry(network, x)
    assert sorted(group.size for group in symmetry.groups.values()) == [16] * 4 + [32] * 4 + [64] * 4
    before = network(x)
    network.load_state_dict(symmetry.random(torch.Generator().manual_seed(0)).apply(network))
    assert (network(x) - before).abs().max() < 1e-9 * before.abs().max()
