"""The state of an optimiser moves along with its parameters."""

import pytest
import torch
from torch import nn

import onebasin as ob


def trained_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    lambda p: torch.optim.AdamW(list(p)[::-1], lr=0.01, amsgrad=True),
])  # fmt: skip
def test_optimizer_state_travels(make):
    """Training on after permuting model and optimiser is permuting after training on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizer = make(model.parameters())
    for _ in range(3):
        trained_step(model, optimizer, x)
    permutation = ob.symmetry(model, x).random()
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    twin.load_state_dict(permutation.apply(model))
    twin_optimizer = make(twin.parameters())
    before = optimizer.state_dict()["state"][0]
    twin_optimizer.load_state_dict(permutation.apply_optimizer(optimizer, model))
    assert all(torch.equal(v, optimizer.state_dict()["state"][0][k]) for k, v in before.items())
    for _ in range(3):
        trained_step(model, optimizer, x)
        trained_step(twin, twin_optimizer, x)
    expected = permutation.apply(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)


def test_factored_moments_and_foreign_parameters_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    permutation = ob.symmetry(model, torch.zeros(1, 4)).random()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["row"] = torch.zeros(8)
    with pytest.raises(ValueError, match="their states are factored and cannot be permuted"):
        permutation.apply_optimizer(optimizer, model)
    with pytest.raises(ValueError, match="not one of the model's"):
        permutation.apply_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), model)
