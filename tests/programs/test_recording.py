"""A recording has the operations of a module, leaves the module alone, and refuses what it cannot follow."""

import warnings

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs import recording
from onebasin.programs.failures import NotRecordable, ReadsValues
from onebasin.programs.recording import record
from tests.cases import call_of, flat, two_layers


class Sneaky:
    """A class that no tree of tensors is known of."""

    def __init__(self, value):
        self.value = value


def read_a_value(self, x):
    h = self.first(x)
    return self.last(h if h.sum() > 0 else -h)


def read_what_another_view_wrote(self, x):
    h = self.first(x)
    other = h[:, :4]
    h[:, 0] = 1.0
    return self.last(torch.cat([other, h[:, 4:]], 1))


def write_what_has_another_name(self, x):
    h = self.first(x)
    other = h.view(-1)
    h.mul_(torch.arange(8.0))
    return self.last(other.view(-1, 8))


def write_a_constant_after_it_was_read(self, x):
    weights = torch.arange(8.0)
    h = self.first(x) * weights
    weights.fill_(1.0)
    return self.last(h * weights)


def read_what_zeros_became(self, x):
    h, zeros = self.first(x), torch.zeros(3, 8)
    before = zeros[:, :4]
    zeros[:, :] = h
    return self.last(torch.cat([before, h[:, 4:]], 1))


def write_zeros_through_two_slices(self, x):
    zeros = torch.zeros(3, 8)
    first, second = zeros[:, :4], zeros[:, 2:]
    first.copy_(self.first(x)[:, :4])
    second.copy_(self.first(x)[:, 2:])
    return self.last(zeros)


def write_an_input(self, x):
    x.add_(1.0)
    return self.last(self.first(x))


def write_a_buffer(self, x):
    self.count.add_(1.0)
    return self.last(self.first(x) * self.count)


def return_something_else(self, x):
    h = self.first(x)
    return self.last(h), Sneaky(h)


# The sizes of the groups that the exporter finds; None where it refuses too.
REFUSED = {
    read_a_value: None,
    read_what_another_view_wrote: [3, 4],  # all units but the one that is written
    write_what_has_another_name: [],
    write_a_constant_after_it_was_read: [],
    read_what_zeros_became: [4, 4],
    write_zeros_through_two_slices: None,
    write_an_input: [8],
    write_a_buffer: [],
    return_something_else: None,
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_what_a_recording_cannot_tell_is_left_to_the_exporter(forward):
    model = two_layers(forward, count=torch.ones(8))
    inputs = torch.rand(3, 4)
    before = inputs.clone()
    with pytest.raises((NotRecordable, RuntimeError)):
        record(model, call_of(inputs))
    if REFUSED[forward] is None:
        with pytest.raises(ValueError, match="cannot trace"):
            ob.symmetry(model, inputs)
    else:
        assert [group.size for group in ob.symmetry(model, inputs).groups.values()] == REFUSED[forward]
    assert torch.equal(inputs, before)


def test_a_write_under_the_only_name_is_followed():
    def forward(self, x):
        h = self.first(x)
        same = h
        h.relu_()
        h += 1.0
        return self.last(same)

    model = two_layers(forward)
    record(model, call_of(torch.rand(3, 4)))
    assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 1


def overwrite_a_unit(self, x):
    h = self.first(x)
    h[:, 0] = 1.0
    return self.last(h)


def overwrite_a_row_of_a_part(self, x):
    h = self.first(x)
    h[:, 2:][0].zero_()
    return self.last(h)


def copy_between_units(self, x):
    h = self.first(x)
    h[:, 2:4] = h[:, 4:6] * 2
    return self.last(h.sin())


def fill_slices_of_zeros(self, x):
    h, zeros = self.first(x), torch.zeros(len(x), 8)
    zeros[:, :3] = h[:, :3]
    zeros[:, 3:] = h[:, 3:] + zeros[:, :3].sum(1, keepdim=True)
    return self.last(zeros)


def fill_a_row_of_a_part_of_zeros(self, x):
    h, zeros = self.first(x), torch.zeros(3, 8)
    zeros[:, 2:][0].add_(h[0, 2:])
    return self.last(zeros + h)


def interleave_in_zeros(self, x):
    first, second = self.first(x).chunk(2, -1)
    made = torch.empty_like(torch.cat([first, second], -1))
    made[..., 0::2] = first.sin()
    made[..., 1::2] = second.cos()
    return self.last(made)


def add_to_everything(self, x):
    h = self.first(x)
    h[..., :8] += x.sum()
    return self.last(h)


def fill_a_constant(self, x):
    h = self.first(x)
    made = h.new_empty(len(x), 8)
    made[:, :3].copy_(h[:, 3:6])
    made[:, 3:].copy_(h[:, 3:])
    return self.last(made.sin())


def fill_a_row_of_a_constant(self, x):
    made = torch.zeros(2, len(x), 8)
    made[1, 1:] = self.first(x)[1:]
    return self.last(made[0] + made[1])


FOLLOWED = {
    overwrite_a_unit: [7],
    overwrite_a_row_of_a_part: [2, 6],
    copy_between_units: [2, 2, 2],
    fill_slices_of_zeros: [3, 5],
    fill_a_row_of_a_part_of_zeros: [2, 6],
    interleave_in_zeros: [4],
    add_to_everything: [8],
    fill_a_constant: [3, 2],
    fill_a_row_of_a_constant: [8],
}


@pytest.mark.parametrize(("forward", "sizes"), FOLLOWED.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_writes_through_slices_are_followed(forward, sizes):
    model = two_layers(forward)
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert [f.name for f in symmetry.front_ends] == ["recording"]
    assert [group.size for group in symmetry.groups.values()] == sizes


def test_a_slice_of_a_constant_that_was_written_through_another_is_refused():
    def forward(self, x):
        made = torch.zeros(len(x), 8)
        other = made[:, 2:]
        made[:, :4].copy_(self.first(x)[:, :4])
        return self.last(torch.cat([made[:, :2], other], 1))

    with pytest.raises(NotRecordable, match="other views"):
        record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_parameters_outside_of_their_modules_are_known():
    model = two_layers(lambda self, x: self.last(x @ self.kept[0].t().contiguous() + self.first.bias))
    model.kept = [model.first.weight]
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert list(symmetry.groups) == ["first"]


def test_the_model_is_left_as_it_was():
    def forward(self, x):
        self.last_activation = self.first(x)
        self.calls += 1
        self.cache = torch.rand(3)
        return self.last(self.last_activation)

    model = two_layers(forward).train()
    model.calls = 0
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks)
    record(model, call_of(torch.rand(3, 4)))
    assert not hasattr(model, "last_activation")
    assert not hasattr(model, "cache")
    assert model.calls == 0
    assert model.training
    assert model.first.training
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks) == hooks
    model(torch.rand(3, 4)).sum().backward()
    assert model.first.weight.grad is not None


def test_the_model_is_left_as_it_was_after_an_error():
    model = two_layers(read_a_value).train()
    with pytest.raises(NotRecordable):
        record(model, call_of(torch.rand(3, 4)))
    assert model.training
    assert not nn.modules.module._global_forward_hooks


def test_random_numbers_of_the_user_are_not_used_up():
    model = two_layers(lambda self, x: self.last(self.first(x) + torch.rand(1)))
    inputs = torch.rand(3, 4)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    ob.symmetry(model, inputs)
    assert torch.equal(torch.rand(3), expected)


def test_warnings_of_the_model_are_kept_to_itself():
    def forward(self, x):
        warnings.warn("a word of advice", stacklevel=1)
        return self.last(self.first(x))

    record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_inputs_have_the_names_of_the_arguments():
    model = two_layers(lambda self, x: self.last(self.first(x["left"]) + self.first(x["right"])))
    program = record(model, call_of(({"left": torch.rand(3, 4), "right": torch.rand(3, 4)},)))
    assert [name for kind, name in program.inputs.values() if kind.name == "USER_INPUT"] == ["args_0", "args_1"]


def test_operations_know_the_modules_that_call_them():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Tanh()))
    nodes = [n for n in record(model, call_of(torch.rand(3, 4))).graph.nodes if n.op == "call_function"]
    assert [n.meta["module"][0] for n in nodes] == ["0", "1", "0", "3.0"]
    assert nodes[0].meta["module"] != nodes[2].meta["module"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(4, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match="cannot trace"):
        ob.symmetry(model, flat()())


@pytest.mark.parametrize("flag", [torch.tensor(1), torch.tensor([True])])
def test_flags_of_the_state_are_read(flag):
    """No input changes them. Another tensor of the state is not a flag."""

    def forward(self, x):
        h = self.first(x)
        return self.last(h if self.flag else h * torch.arange(8.0))

    inputs = torch.rand(3, 4)
    assert [group.size for group in ob.symmetry(two_layers(forward, flag=flag), inputs).groups.values()] == [8]
    assert not ob.symmetry(two_layers(forward, flag=torch.zeros_like(flag)), inputs).groups
    with pytest.raises(ReadsValues):
        record(two_layers(forward, flag=torch.tensor(1.0)), call_of(inputs))


def test_a_parameter_that_is_returned_is_an_output():
    model = two_layers(lambda self, x: (self.last(self.first(x)), self.first.bias))
    record(model, call_of(torch.rand(3, 4)))
    assert not ob.symmetry(model, torch.rand(3, 4)).groups


def test_the_first_refusal_is_the_reason():
    """Also if the module catches it, and raises another error."""

    def forward(self, x):
        try:
            return self.last(self.first(x)) if x.sum() > 0 else x
        except Exception as error:
            raise RuntimeError("something went wrong") from error

    with pytest.raises(ReadsValues, match="__bool__ reads or replaces values of a tensor"):
        record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_a_bug_of_the_recorder_surfaces(monkeypatch):
    """It is neither taken for an error of the module, nor hidden by a module that catches everything."""
    monkeypatch.setattr(recording._Recorder, "_add_node", lambda self, *args: {}["bug"])

    def forward(self, x):
        try:
            return self.last(self.first(x))
        except Exception:
            return x

    for model in (two_layers(lambda self, x: self.last(self.first(x))), two_layers(forward)):
        with pytest.raises(KeyError, match="bug"):
            ob.symmetry(model, torch.rand(3, 4))
