import pytest
import torch
from adapted_network import TOKENS, Network, adapted

from onebasin.checkpoints import move_optimizer
from onebasin.checkpoints.moving import move_file


def trained(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()


def test_training_goes_on_as_if_nothing_had_moved(tmp_path):
    """The strongest oracle: resume on moved weights with the moved state, and arrive at the moved result."""
    model, _, permutation, _, _ = adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = Network()
    twin.load_state_dict(permutation.apply(model))
    moved = move_file(permutation, tmp_path / "optimizer.pt")
    assert moved.kind == "optimizer"
    moved.write(tmp_path / "moved.pt")
    resumed = torch.optim.AdamW(twin.parameters(), lr=0.1)
    resumed.load_state_dict(torch.load(tmp_path / "moved.pt", weights_only=True))
    trained(model, optimizer)
    trained(twin, resumed)
    for key, value in permutation.apply(model).items():
        torch.testing.assert_close(twin.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_optimizers_tell_the_names_of_their_parameters():
    model, _, permutation, _, _ = adapted()
    named = [(name, p) for name, p in model.named_parameters() if name.startswith(("conv", "last"))][::-1]
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    trained(model, optimizer, 1)
    saved = optimizer.state_dict()
    moved = move_optimizer(permutation, saved)
    place = [name for name, _ in named].index("conv.weight")
    expected = permutation.move(saved["state"][place]["momentum_buffer"], permutation.symmetry.layouts["conv.weight"])
    assert torch.equal(moved["state"][place]["momentum_buffer"], expected)
    for group in saved["param_groups"]:
        del group["param_names"]
    with pytest.raises(ValueError, match="the optimiser has 4 parameters, the model 7: their names are needed"):
        move_optimizer(permutation, saved)
    with pytest.raises(ValueError, match="is not the state dict of an optimiser"):
        move_optimizer(permutation, {"state": {}})
