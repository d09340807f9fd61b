"""Gradients of a replay are those of the module, one tensor after the other."""

import pytest
import torch
from torch import Tensor, nn

from onebasin.programs.frontends import read_program
from onebasin.programs.gradients import iterate_gradients
from onebasin.tensors.states import LazyState, read_state
from tests.basis_networks import MLP, Attention, D, Model, Tied
from tests.cases import call_of


class Pieces(nn.Module):
    """An operation with several results, one that is read twice, and a parameter that is returned."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.shift = nn.Linear(3, 8), nn.Linear(4, 2), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = self.first(x).chunk(2, -1)
        return self.second(left * right) + self.shift, self.second(right.sin()), self.shift


class Assigned(nn.Module):
    """Assignments to slices, of other values and of one that is repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        left, hidden = self.first(x), self.second(x)
        hidden[..., 0] = left[..., 1]
        hidden[..., 2:] = left[..., :1]
        return hidden


def make(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = {
        "transformer": lambda: Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]),
        "tied": Tied,
        "pieces": Pieces,
        "assigned": Assigned,
        "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU()),
        "recurrent": lambda: nn.LSTM(3, 5, num_layers=2, batch_first=True),
    }[kind]()
    inputs = {"tied": torch.randint(0, 11, (2, 4)), "convolution": torch.randn(2, 3, 8, 8)}
    x = inputs.get(kind, torch.randn(2, 4, 3))
    return model.double().eval(), x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("kind", ["transformer", "tied", "pieces", "assigned", "convolution", "recurrent"])
def test_gradients_are_those_of_the_module(kind):
    model, x = make(kind)
    program = read_program(model, call_of(x))
    found = dict(iterate_gradients(program, read_state(model), torch.cos))
    outputs = model(x)
    outputs = outputs if isinstance(outputs, Tensor) else (outputs[0], *outputs[1]) if kind == "recurrent" else outputs
    total = sum((value * value.detach().cos()).sum() for value in ([outputs] if isinstance(outputs, Tensor) else outputs))
    total.backward()  # type: ignore[union-attr]
    parameters = dict(model.named_parameters())
    assert found.keys() >= parameters.keys()
    for key, parameter in parameters.items():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_tensor_is_read_where_it_is_needed_and_its_gradient_is_given_away():
    """Of five layers one is in memory; nothing is read again once its gradient is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(5))).double()
    state = read_state(model)
    read: list[str] = []
    lazy = LazyState(
        {key: value.to("meta") for key, value in state.shapes.items()}, lambda key: (read.append(key), state[key].clone())[1]
    )
    program = read_program(model, call_of(torch.randn(2, 6).double()))
    for key, _ in iterate_gradients(program, lazy, torch.cos):
        assert read[-1] == key
    assert read == [f"{n}.weight" for n in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)]
