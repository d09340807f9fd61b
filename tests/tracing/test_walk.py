"""Rules are applied to every operation: what they do not cover is pinned, with the reason, and their bugs surface."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.programs.recording import record
from onebasin.tracing.rules import RULES
from onebasin.tracing.trace import NotCovered, Trace
from onebasin.tracing.walk import walk
from tests.cases import Fn, call_of, two_layers


def relu_network():
    return two_layers(lambda self, x: self.last(torch.relu(self.first(x))))


@pytest.mark.parametrize("error", [KeyError, TypeError, IndexError, ValueError, ZeroDivisionError])
def test_a_bug_in_a_rule_surfaces(error, monkeypatch):
    def rule(trace, args):
        raise error("a mistake")

    monkeypatch.setitem(RULES, "relu", rule)
    with pytest.raises(error, match="a mistake"):
        ob.symmetry(relu_network(), torch.rand(3, 4))


def test_a_rule_that_asks_for_an_argument_that_does_not_exist_has_a_bug(monkeypatch):
    monkeypatch.setitem(RULES, "relu", lambda trace, args: args["output"])
    with pytest.raises(KeyError, match="output"):
        ob.symmetry(relu_network(), torch.rand(3, 4))


def test_a_rule_that_returns_another_shape_has_a_bug(monkeypatch):
    monkeypatch.setitem(RULES, "relu", lambda trace, args: args.input[:1])
    with pytest.raises(AssertionError, match=r"the rule of aten.relu.default returns \(3,\), not \(3, 8\)"):
        ob.symmetry(relu_network(), torch.rand(3, 4))


def test_what_a_rule_does_not_cover_is_pinned_with_the_reason(monkeypatch):
    def rule(trace, args):
        raise NotCovered("negative slopes")

    monkeypatch.setitem(RULES, "relu", rule)
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4))
    assert not symmetry.groups
    expected = "the rule does not cover this use: negative slopes (relu in 1)"
    assert str(symmetry.pinned["0.weight", 0]) == str(symmetry.pinned["2.weight", 1]) == expected


def test_rules_can_be_given():
    trace = Trace()
    program = record(relu_network(), call_of(torch.rand(3, 4)), training=True)
    walk(program, trace, rules={})
    assert all(atom.pin for axes in trace.state.values() for atom in axes)


def test_operations_in_place_have_the_rule_of_those_that_are_not():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    assert list(ob.symmetry(model, torch.rand(3, 4)).groups) == ["0.weight"]


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.b(torch.relu(self.a(x)))
        return self.c(torch.fft.fft(h, dim=0).real + torch.linalg.qr(h)[0])


def test_unknown_operations_pin_and_say_so():
    symmetry = ob.symmetry(Unknown(), torch.rand(6, 4))
    assert list(symmetry.groups) == ["a"]
    pin = symmetry.pinned["b.weight", 0]
    assert "no rule for this operation" in str(pin)
    assert pin.operation
    assert "b.weight[0]" in str(symmetry)


def test_random_masks_pin():
    class AlwaysDrop(nn.Sequential):
        def forward(self, x):
            return self[1](nn.functional.dropout(self[0](x), 0.5, training=True))

    symmetry = ob.symmetry(AlwaysDrop(nn.Linear(4, 8), nn.Linear(8, 2)), torch.rand(3, 4))
    assert not symmetry.groups


def test_operations_that_could_draw_but_do_not_are_elementwise():
    symmetry = ob.symmetry(two_layers(lambda self, x: self.last(F.rrelu(self.first(x), training=False))), torch.rand(3, 4))
    assert len(symmetry.groups) == 1


def test_axes_that_do_not_fit_each_other_are_pinned_with_a_reason():
    def forward(self, x):
        first, second = self.first(x).view(-1, 2, 4), self.other(x).view(-1, 4, 2)
        return self.last(first.flatten(1) + second.transpose(1, 2).flatten(1) + second.flatten(1))

    model = Fn(forward, first=nn.Linear(4, 8), other=nn.Linear(4, 8), last=nn.Linear(8, 2))
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert all(pin.reason for pin in symmetry.pinned.values())


def test_positions_that_depend_on_values_are_pinned():
    """A row that an input names, where the input has no value."""
    model = two_layers(lambda self, x, row: self.last(self.first(x) * self.table[row]), table=nn.Parameter(torch.rand(5, 8)))
    inputs = torch.rand(3, 4, device="meta"), torch.tensor(1, device="meta")
    symmetry = ob.symmetry(model.to("meta"), inputs, verify=False)
    assert not symmetry.groups
    assert "depends on values" in str(symmetry.pinned["table", 1])
