"""Gates of a cell share one group of hidden units; layers and directions have their own."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.cases import Fn, sequence, weight, written


@pytest.mark.parametrize(
    ("layer", "width", "groups"),
    [
        (nn.LSTM(4, 6, batch_first=True), 6, ["6"]),
        (nn.LSTM(4, 6, bidirectional=True), 12, ["6", "6"]),
        (nn.LSTM(4, 6, proj_size=3), 3, ["3", "6"]),
        (nn.LSTM(4, 6, bias=False), 6, ["6"]),
        (nn.GRU(4, 6, num_layers=2), 6, ["6", "6"]),
        (nn.RNN(4, 6, nonlinearity="relu"), 6, ["6"]),
    ],
    ids=str,
)
def test_hidden_units_move(layer, width, groups):
    model = Fn(lambda self, x: self.head(self.layer(x)[0]), layer=layer, head=nn.Linear(width, 2))
    assert written(model, sequence()()) == groups


@pytest.mark.parametrize("cell", [nn.LSTMCell(4, 6), nn.GRUCell(4, 6), nn.RNNCell(4, 6)], ids=str)
def test_cells_that_are_called_by_hand(cell):
    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)

    assert written(Fn(forward, cell=cell, head=nn.Linear(6, 2)), sequence()()) == ["6"]


def test_a_given_state_moves_with_the_units():
    model = Fn(
        lambda self, x: self.head(self.layer(x, self.start[None, None].expand(1, 2, 6).contiguous())[0]),
        layer=nn.GRU(4, 6, batch_first=True),
        start=weight(6),
        head=nn.Linear(6, 2),
    )
    symmetry = ob.symmetry(model, sequence()())
    (group,) = symmetry.groups
    assert [term.name for term in symmetry.layouts["start"]] == [group]


def test_equal_inputs_have_different_states():
    """A code that is given to a decoder at every step."""

    def forward(self, x):
        states, _ = self.layer(self.first(x)[:, None].expand(-1, 5, -1))
        return self.head((states * self.steps[:, None]).sin().sum(1))

    torch.manual_seed(0)
    layer = nn.GRU(6, 6, num_layers=2, batch_first=True)
    assert written(Fn(forward, first=nn.Linear(4, 6), layer=layer, steps=weight(5), head=nn.Linear(6, 2))) == ["6", "6", "6"]


def test_time_has_an_order():
    """Positions that are a parameter would move without a recurrent layer."""

    def forward(self, x):
        return self.head(self.layer(self.table[None])[0]).sum() * x

    torch.manual_seed(0)
    model = Fn(forward, table=weight(5, 4), layer=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.randn(3))
    assert str(symmetry.pinned["table", 0]).startswith("time has an order")
