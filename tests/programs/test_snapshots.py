"""A run of a module leaves no trace in it."""

from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn

from onebasin.programs.calls import read_calls
from onebasin.programs.failures import NotRecordable
from onebasin.programs.recording import record
from onebasin.programs.snapshots import ModuleSnapshot
from tests.cases import Fn


def leave_traces(self, x):
    h = self.first(x)
    self.last_activation = h
    self.in_list.append(h)
    self.in_list[0].append(h)
    self.in_dict["h"] = h
    self.in_dict["inner"]["h"] = h
    self.in_order.pop("a")
    self.in_groups["h"].append(h)
    self.in_set.add(h)
    self.in_line.append(h)
    self.in_tuple[0].append(h)
    self.first.weight.requires_grad_(False)
    self.first.bias.grad = torch.zeros(8)
    self.register_buffer("late", torch.ones(2))
    self.first.register_forward_hook(lambda *_: None)
    del self.spare
    x.requires_grad_()
    return self.last(h)


def make():
    model = Fn(leave_traces, first=nn.Linear(4, 8), last=nn.Linear(8, 2), spare=nn.Linear(2, 2))
    model.in_list, model.in_dict, model.in_order = [[]], {"inner": {}}, OrderedDict(a=1, b=2)
    model.in_groups, model.in_set, model.in_line, model.in_tuple = defaultdict(list), {1}, deque([1, 2], 2), ([],)
    return model


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_in_a_model(fails):
    model, inputs = make(), torch.rand(3, 4)
    if fails:
        model.last.register_forward_hook(lambda *_: 1 / 0)
    containers = {name: value for name, value in vars(model).items() if name.startswith("in_")}
    before = str(vars(model)), str(vars(model.first))
    with pytest.raises(NotRecordable, match="ZeroDivisionError") if fails else torch.enable_grad():
        record(model, read_calls(inputs)[0])
    assert (str(vars(model)), str(vars(model.first))) == before
    assert all(getattr(model, name) is value for name, value in containers.items())
    assert model.first.weight.requires_grad
    assert model.first.bias.grad is None
    assert not inputs.requires_grad


def test_lists_among_the_inputs_are_left_as_they_were():
    def forward(self, entries, named):
        entries.append(self.first(entries[0]))
        named["h"] = entries[1]
        return self.last(named["h"])

    model = Fn(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2))
    entries, named = [torch.rand(3, 4)], {}
    record(model, read_calls((entries, named))[0])
    assert len(entries) == 1
    assert not named


def test_tensors_are_found_wherever_they_are_kept():
    model = nn.Linear(2, 2, bias=False)
    model.kept = [torch.ones(1), {"a": (torch.ones(2),)}]
    model.kept.append(model.kept)
    assert [tuple(tensor.shape) for tensor in ModuleSnapshot(model).tensors] == [(2, 2), (1,), (2,)]
