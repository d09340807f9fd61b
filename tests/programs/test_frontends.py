"""A call is recorded and checked against the module, or else exported, and the program says which."""

import itertools

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs import frontends
from onebasin.programs.calls import read_calls
from onebasin.programs.failures import NotRecordable
from onebasin.programs.frontends import check_recording, differs_in_batch_only, read_program, read_training_program
from onebasin.programs.graph import FrontEnd
from onebasin.programs.recording import record
from tests.cases import call_of, two_layers
from tests.networks import CASES


@pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_recording_finds_what_an_export_finds(name, monkeypatch):
    torch.manual_seed(0)
    model, inputs = CASES[name].make(), CASES[name].inputs()
    found = ob.symmetry(model, inputs, verify=False)
    monkeypatch.setattr(frontends, "record", refuse)
    expected = ob.symmetry(model, inputs, verify=False)
    assert found.groups == expected.groups
    assert found.layouts == expected.layouts
    assert found.pinned.keys() == expected.pinned.keys()
    assert (found.num_hidden, found.num_free) == (expected.num_hidden, expected.num_free)
    assert found.sites == expected.sites


def refuse(model, call, training=False):
    raise NotRecordable("for a test")


def test_nearly_all_networks_are_recorded():
    followed = []
    for case in CASES.values():
        for call in read_calls(case.inputs()):
            model = case.make()
            try:
                check_recording(record(model, call), model, call)
                followed.append(True)
            except NotRecordable:
                followed.append(False)
    assert sum(followed) > 0.95 * len(followed)


def test_a_recording_that_returns_something_else_is_not_believed(monkeypatch):
    """Whatever the fault is, the exporter has the last word."""
    model = two_layers(lambda self, x: self.last(self.first(x) * self.count), count=torch.arange(8))
    inputs = torch.rand(3, 4)

    def mistake(model, call, training=False):
        program = record(model, call)
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor:
                node.replace_all_uses_with(node.args[0])
                program.graph.erase_node(node)
        return program

    monkeypatch.setattr(frontends, "record", mistake)
    assert ob.symmetry(model, inputs, verify=False).groups
    assert not ob.symmetry(model, inputs).groups


def test_what_changes_from_run_to_run_is_not_believed():
    numbers = itertools.count()
    model = two_layers(lambda self, x: self.last(self.first(x) + next(numbers)))
    call = call_of(torch.rand(3, 4))
    with pytest.raises(NotRecordable, match="something else than the module"):
        check_recording(record(model, call), model, call)


def test_random_operations_are_confirmed_with_the_same_numbers():
    model = two_layers(lambda self, x: self.last(torch.nn.functional.dropout(self.first(x), 0.5, training=True)))
    call = call_of(torch.rand(3, 4))
    check_recording(record(model, call), model, call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_promoted(dtype):
    """Some processors crash on a product in bfloat16."""
    model = two_layers(lambda self, x: self.last(self.first(x))).to(dtype)
    call = call_of(torch.rand(3, 4, dtype=dtype))
    program = record(model, call)
    types = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types_, args=(), kwargs=None):
            if func is torch.ops.aten.linear.default:
                types.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Watch():
        check_recording(program, model, call)
    assert set(types) == {torch.float64}


def test_numbers_that_are_not_finite_are_compared():
    model = two_layers(lambda self, x: torch.log(self.last(self.first(x)) * 0 - torch.tensor([1.0, 0.0])))
    call = call_of(torch.rand(3, 4))
    check_recording(record(model, call), model, call)


def test_the_front_end_is_part_of_the_symmetry():
    def write_an_input(self, x):
        x.add_(1.0)
        return self.last(self.first(x))

    recorded = ob.symmetry(two_layers(lambda self, x: self.last(self.first(x))), torch.rand(3, 4))
    assert recorded.front_ends == (FrontEnd("recording"),)
    assert "exported" not in str(recorded)
    exported = ob.symmetry(two_layers(write_an_input), torch.rand(3, 4))
    (front_end,) = exported.front_ends
    assert front_end.name == "export"
    assert "aten.add_.Tensor writes a tensor that is not the result of an operation" in front_end.reason
    assert f"exported, because it could not be recorded: {front_end.reason}" in str(exported)


def test_a_bug_in_a_check_surfaces(monkeypatch):
    monkeypatch.setattr(frontends, "_are_close", lambda *_: [][0])
    with pytest.raises(IndexError):
        read_program(two_layers(lambda self, x: self.last(self.first(x))), call_of(torch.rand(3, 4)))


class Head(nn.Module):
    """With a second head in train mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.main, self.auxiliary = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x)
        return (self.main(h), self.auxiliary(h)) if self.training else self.main(h)


def test_programs_in_train_mode():
    """Dropout is off, statistics are not updated, and the module keeps its mode."""
    model = Head().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    call = call_of(torch.rand(3, 4))
    program = read_training_program(model, call, record(model, call))
    assert program.training
    assert not program.is_random
    assert "auxiliary.weight" in program.reads
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.body[1].num_batches_tracked is not None


def test_a_single_sample_is_enough_for_a_norm_in_train_mode():
    model, call = Head(), call_of(torch.rand(1, 4))
    program = read_training_program(model, call, record(model, call))
    assert len(program.given["x"]) == 2


def test_what_cannot_be_recorded_in_train_mode_is_reported():
    model = two_layers(lambda self, x: self.last(self.first(x)) if not self.training else x.sum().item())
    call = call_of(torch.rand(3, 4))
    with pytest.raises(NotRecordable, match="item"):
        read_training_program(model, call, record(model, call))
    symmetry = ob.symmetry(model, call.args[0])
    assert len(symmetry.groups) == 1
    assert "train mode could not be traced, and may have less symmetry" in str(symmetry)


def test_modes_that_differ_in_dropout_and_statistics_alone_are_one_program():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.MultiheadAttention(8, 2).out_proj)
    call = call_of(torch.rand(3, 4))
    assert read_training_program(model, call, record(model, call)) is None


def flatten_samples(self, x):
    return self.last(self.first(x.reshape(x.shape[0] * 2, 4)))


def repeat_once_more(self, x):
    return self.last(self.first(x[0]).repeat(x.shape[0] + 1, 1))


def add_a_constant(self, x):
    return self.last(self.first(x) + torch.arange(float(x.shape[0])).view(-1, 1, 1))


@pytest.mark.parametrize(
    ("forward", "expected"), [(flatten_samples, True), (repeat_once_more, False), (add_a_constant, False)]
)
def test_programs_that_differ_in_the_batch_alone(forward, expected):
    model = two_layers(forward)
    first, second = (record(model, call_of(torch.rand(n, 2, 4))) for n in (3, 1))
    assert differs_in_batch_only(first, second) is expected
    longer = record(two_layers(lambda self, x: self.last(self.first(x))), call_of(torch.rand(3, 5, 4)))
    assert not differs_in_batch_only(first, longer)
