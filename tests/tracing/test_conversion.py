"""Groups get stable names, and units are counted."""

import torch
from torch import nn

import onebasin as ob
from onebasin.symmetries import Pin
from onebasin.symmetries.layout import write
from onebasin.tensors.states import find_ties
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.axes.unification import pin
from onebasin.tracing.conversion import find_unreached, to_symmetry
from onebasin.tracing.trace import Trace
from tests.cases import Fn, two_layers, weight


def test_groups_are_named_after_the_module_that_makes_them():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 2))
    assert list(ob.symmetry(model, torch.rand(3, 4)).groups) == ["0.weight", "2.0"]


def test_names_can_be_written_in_a_layout():
    cells = nn.ModuleDict({"a (b)": nn.Linear(4, 8)})
    model = Fn(lambda self, x: self.last(self.cells["a (b)"](x)), cells=cells, last=nn.Linear(8, 2))
    assert list(ob.symmetry(model, torch.rand(3, 4)).groups) == ["cells.a__b_"]


def test_families_name_their_parents():
    def experts(self, x):
        return torch.bmm(torch.relu(torch.bmm(x.expand(3, *x.shape), self.up)), self.down).sum(0)

    symmetry = ob.symmetry(Fn(experts, up=weight(3, 4, 8), down=weight(3, 8, 2)), torch.rand(5, 4))
    assert {name: (group.size, group.parents) for name, group in symmetry.groups.items()} == {
        "up": (3, ()),
        "up:2": (8, ("up",)),
    }


def test_units_are_counted_by_what_makes_them():
    symmetry = ob.symmetry(two_layers(lambda self, x: self.last(self.first(x).cumsum(1))), torch.rand(3, 4))
    assert (symmetry.num_hidden, symmetry.num_free) == (8, 0)
    symmetry = ob.symmetry(two_layers(lambda self, x: self.last(self.first(x))), torch.rand(3, 4))
    assert (symmetry.num_hidden, symmetry.num_free) == (8, 8)


def test_a_trace_without_operations():
    model = nn.Linear(4, 8)
    trace = Trace(find_ties(model))
    trace.state["weight"] = (Atom(8), Atom(4))
    trace.scopes.append(trace.state["weight"])
    trace.reached.add("weight")
    trace.read["weight"] = set(trace.state["weight"])
    assert find_unreached(trace, model) == ("bias",)
    symmetry = to_symmetry(trace, model, [])
    assert {name: group.size for name, group in symmetry.groups.items()} == {"weight": 8, "weight:2": 4}
    pin(trace.state["weight"][0], Pin("for a test"))
    symmetry = to_symmetry(trace, model, [])
    assert [group.size for group in symmetry.groups.values()] == [4]
    assert symmetry.pinned["weight", 0] == Pin("for a test")


def test_units_that_are_told_apart_one_by_one_are_hidden_and_explained():
    """Halves of three units each, cut into pairs and multiplied by constants."""

    def forward(self, x):
        pairs = torch.cat([self.first(x), self.second(x)], -1).view(-1, 3, 2)
        return self.last((pairs * torch.arange(6.0).view(3, 2)).flatten(1))

    model = Fn(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3), last=nn.Linear(6, 2))
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert (symmetry.num_hidden, symmetry.num_free) == (6, 0)
    assert {key for key, axis in symmetry.pinned if axis == 0} >= {"first.weight", "first.bias", "second.weight"}


class Cross(nn.Module):
    """Packed cross-attention: rows of one weight read the stream, and other rows of it the memory."""

    def __init__(self):
        super().__init__()
        self.stream, self.memory = nn.Linear(4, 6), nn.Linear(5, 6)
        self.attention, self.last = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 2)

    def forward(self, x, y):
        h, memory = self.stream(x), self.memory(y)
        return self.last(h + self.attention(h, memory, memory, need_weights=False)[0])


def test_a_packed_weight_reads_two_streams(tmp_path):
    model = Cross()
    symmetry = ob.symmetry(model, (torch.randn(2, 3, 4), torch.randn(2, 7, 5)), verify=False)
    assert write(symmetry.layouts["attention.in_proj_weight"]).endswith(" stream|memory|memory")
    assert symmetry.verify(model, (torch.randn(2, 3, 4), torch.randn(2, 7, 5))) < 1e-9
    planted = symmetry.random(torch.Generator().manual_seed(0))
    planted.save(tmp_path / "p.safetensors")
    assert ob.Permutation.load(tmp_path / "p.safetensors") == planted
    copied = Cross()
    copied.load_state_dict(planted.apply(model))
    for options in ({}, {"method": "weight-matching", "detect_copy": False}, {"method": "sinkhorn", "detect_copy": False}):
        assert ob.align(copied, model, symmetry=symmetry, **options).cost == 0


def test_stacked_weights_that_are_read_one_by_one_have_units_of_their_own():
    def forward(self, x):
        return (x @ self.up[0]).relu() @ self.down[0] + (x @ self.up[1]).relu() @ self.down[1]

    model = Fn(forward, up=weight(2, 4, 6), down=weight(2, 6, 3))
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == [6, 6]
    assert symmetry.verify(model, torch.rand(3, 4)) < 1e-9


def test_rows_that_a_call_does_not_read_belong_to_the_same_units():
    """A table of positions, read in part: what is not read moves with the rest, because a longer call reads it."""

    def forward(self, x):
        return self.last((self.first(x) + self.table[: x.shape[1]]).relu())

    model = Fn(forward, first=nn.Linear(4, 6), last=nn.Linear(6, 2), table=weight(9, 6))
    symmetry = ob.symmetry(model, torch.rand(2, 3, 4), verify=False)
    assert write(symmetry.layouts["table"]).endswith(" first")
    assert symmetry.verify(model, torch.rand(2, 9, 4)) < 1e-9
