"""What the traced calls never read of a parameter stays where it is, so that longer calls are right too."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.symmetries import NEVER_MET, NEVER_READ
from tests.cases import Fn, two_layers, weight


def step_by_step(self, x):
    h = x.new_zeros(len(x), 8)
    for t in range(x.shape[1]):
        h = torch.tanh(self.first(x[:, t]) + self.again(h))
    return self.last(h)


def step_by_step_joined(self, x):
    h = torch.zeros(len(x), 8).to(x)
    for t in range(x.shape[1]):
        h = torch.tanh(self.joined(torch.cat([x[:, t], h], 1)))
    return self.last(h)


def padded(self, x):
    h = F.pad(torch.tanh(self.first(x)), (0, 0, 0, 9 - x.shape[1]))
    return torch.sin(torch.sin(h.flatten(1) @ self.all)).sum(1)


def rotated(self, x):
    angles = torch.arange(x.shape[1])[:, None] * torch.arange(8.0)
    return self.last(self.first(x) * torch.cos(angles).to(x))


# A forward, the length of the call, the sizes of the groups that hold at every length, and the axes that are reported.
CASES = {
    "rows": (lambda self, x: self.last(self.first(x) + self.rows[: x.shape[1]]), 5, [8], {("rows", 0): NEVER_READ}),
    "columns": (
        lambda self, x: self.last(self.first(x) + self.columns[:, : x.shape[1]].T), 5, [8],
        {("columns", 1): NEVER_READ},
    ),
    "made of rows": (
        lambda self, x: self.last(self.first(x) + F.normalize(self.rows, dim=1)[: x.shape[1]]), 5, [8],
        {("rows", 0): NEVER_READ},
    ),
    "a mask": (
        lambda self, x: self.last(self.mask[: x.shape[1], : x.shape[1]] @ self.first(x)), 5, [8],
        {("mask", 0): NEVER_READ, ("mask", 1): NEVER_READ},
    ),
    "a relative table": (
        lambda self, x: self.last(self.first(x) + self.rows[8 - x.shape[1] : 7 + x.shape[1]].cumsum(0)[-1]), 3, [8],
        {("rows", 0): NEVER_READ},
    ),
    "a task": (lambda self, x: self.last(self.first(x) * self.rows[3]), 5, [8], {("rows", 0): NEVER_READ}),
    "a recurrent cell": (step_by_step, 1, [8], {}),  # it is traced at length two as well
    "a joined recurrent cell": (step_by_step_joined, 1, [8], {}),
    "a cell for one step": (lambda self, x: step_by_step(self, x[:, :1]), 5, [], {("again.weight", 1): NEVER_MET}),
    "padding": (padded, 5, [], {("all", 0): NEVER_MET}),
    "rotary at one position": (rotated, 1, [], {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # no forward uses all parameters
@pytest.mark.parametrize("name", CASES)
def test_longer_calls_are_right(name):
    forward, length, sizes, unread = CASES[name]
    members = {"rows": weight(16, 8), "columns": weight(8, 16), "mask": weight(16, 16), "all": weight(72, 3)}
    model = two_layers(forward, again=nn.Linear(8, 8), joined=nn.Linear(12, 8), **members).double()
    symmetry = ob.symmetry(model, torch.rand(2, length, 4).double(), verify=False)
    assert [group.size for group in symmetry.groups.values()] == sizes
    assert dict(symmetry.unread) == unread
    for other in (length, 7):
        assert symmetry.verify(model, torch.rand(3, other, 4).double()) < 1e-9


def test_what_is_unread_is_described():
    model = two_layers(CASES["rows"][0], rows=weight(16, 8))
    assert "read in part by these calls, the rest left alone: rows[0]" in str(ob.symmetry(model, torch.rand(2, 5, 4)))


def test_parts_that_are_all_read_stay_free():
    def forward(self, x):
        gate, value = self.packed(x).chunk(2, -1)
        return self.last(torch.sigmoid(gate) * value)

    symmetry = ob.symmetry(Fn(forward, packed=nn.Linear(4, 16), last=nn.Linear(8, 2)), torch.rand(3, 4), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [8]
    assert not symmetry.unread


def test_layers_whose_states_are_dropped_are_read():
    model = Fn(lambda self, x: self.last(self.cells(x)[0]), cells=nn.LSTM(4, 6, num_layers=2), last=nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.rand(5, 3, 4), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [6, 6]


def test_segments_of_one_unit_are_not_free():
    symmetry = ob.symmetry(
        two_layers(lambda self, x: self.last(torch.cat(self.first(x).split([1, 7], 1), 1))), torch.rand(3, 4), verify=False
    )
    assert (symmetry.num_hidden, symmetry.num_free) == (8, 7)


def test_the_walk_ends():
    def forward(self, x):
        h = self.first(x)
        return self.last(torch.stack([h, torch.zeros_like(h)]).sum(0))

    symmetry = ob.symmetry(two_layers(forward), torch.rand(3, 4), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [8]


def test_loops_of_many_steps():
    def forward(self, x):
        return self.last(torch.stack([self.first(x[:, t]) for t in range(x.shape[1])], 1))

    symmetry = ob.symmetry(two_layers(forward), torch.rand(2, 400, 4), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [8]


def test_what_is_computed_and_dropped_is_read():
    """Another call may return it, and reads the parameters in the same way."""

    def forward(self, x):
        h = self.first(x).relu()
        torch.tanh(self.pooler(h))
        return self.last(h)

    symmetry = ob.symmetry(two_layers(forward, pooler=nn.Linear(8, 8)), torch.rand(3, 4), verify=False)
    assert symmetry.groups["first"].size == 8
    assert not symmetry.unread
