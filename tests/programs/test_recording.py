"""A recording says what an export says, leaves the model alone, and knows what it cannot follow."""

import itertools
import warnings

import pytest
import torch
from cases import Fn, flat, image, weight
from networks import CASES
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.programs import frontends, shapes
from onebasin.programs.calls import read_calls
from onebasin.programs.failures import NotRecordable
from onebasin.programs.frontends import check_recording
from onebasin.programs.recording import record


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
    model = two_layers(lambda self, x: self.last(self.first(x) * self.count), count=torch.arange(8.0))
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


def call_of(inputs):
    return read_calls(inputs)[0]


def two_layers(forward, **members):
    torch.manual_seed(0)
    return Fn(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2), **members)


class Sneaky:
    """A class that no tree of tensors is known of."""

    def __init__(self, value):
        self.value = value


def read_a_value(self, x):
    h = self.first(x)
    return self.last(h if h.sum() > 0 else -h)


def write_through_a_view(self, x):
    h = self.first(x)
    h[:, 0] = 1.0
    return self.last(h)


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
    write_through_a_view: [7],  # all units but the one that is written
    write_what_has_another_name: [],
    write_a_constant_after_it_was_read: [],
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


def test_constants_are_computed():
    """A mask that is the same for all units frees them, one that is not pins them."""
    made = {
        "same": lambda: torch.ones(8).cumsum(0).clamp(max=1.0),
        "varies": lambda: torch.ones(8).cumsum(0).clamp(max=2.0),
    }
    for name, make in made.items():
        model = two_layers(lambda self, x, make=make: self.last(self.first(x) * make()))
        program = record(model, call_of(torch.rand(3, 4)))
        assert [len(value.shape) for value in program.given.values()] == [2, 1]
        assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == (1 if name == "same" else 0)


def test_what_is_made_in_the_shape_of_a_result_is_a_constant():
    """And may be written through views: so masks are made."""

    def forward(self, x):
        h = self.first(x)
        mask = h.new_zeros(8)
        mask[:4] = 1.0
        return self.last(h * mask + torch.zeros_like(h))

    program = record(two_layers(forward), call_of(torch.rand(3, 4)))
    assert [tuple(value.shape) for value in program.given.values()] == [(3, 4), (8,), (3, 8)]
    assert not ob.symmetry(two_layers(forward), torch.rand(3, 4)).groups


def test_values_of_constants_may_be_read():
    def forward(self, x):
        steps = torch.arange(3)
        return self.last(self.first(x)) * (2.0 if steps.max().item() == 2 else 1.0)

    record(two_layers(forward), call_of(torch.rand(3, 4)))


def test_a_constant_that_was_read_is_still_a_constant():
    def forward(self, x):
        positions = torch.arange(8.0)
        h = self.first(x) + positions
        assert positions.sum().item() == 28
        return self.last(h)

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


def test_constants_have_names():
    def forward(self, x):
        return self.last(self.first(x) * self.scales + torch.arange(8.0))

    model = two_layers(forward)
    model.register_buffer("scales", torch.arange(8.0), persistent=False)
    program = record(model, call_of(torch.rand(3, 4)))
    assert [name for kind, name in program.inputs.values() if kind.name == "CONSTANT_TENSOR"] == [
        "scales",
        "made for the model",
    ]
    assert "scales" in {pin.operation for pin in ob.symmetry(model, torch.rand(3, 4)).pinned.values()}


def test_operations_know_the_modules_that_call_them():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Tanh()))
    nodes = [n for n in record(model, call_of(torch.rand(3, 4))).graph.nodes if n.op == "call_function"]
    assert [n.meta["module"][0] for n in nodes] == ["0", "1", "0", "3.0"]
    assert nodes[0].meta["module"] != nodes[2].meta["module"]


def test_shapes_that_are_foreseen_are_those_that_are_computed(monkeypatch):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(4 * 36, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2, bias=False),
    )  # fmt: skip

    def read():
        nodes = record(model, call_of(image()())).graph.nodes
        return [(n.meta["val"].shape, n.meta["val"].stride(), n.meta["val"].dtype) for n in nodes if n.op == "call_function"]

    foreseen = read()
    monkeypatch.setattr(shapes, "_infer_common", lambda func, *args: None)
    assert read() == foreseen


@pytest.mark.parametrize("operation", [torch.relu, torch.tanh, lambda x: F.batch_norm(x, torch.ones(3), torch.ones(3))])
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, :1].expand(2, 3, 8, 8),
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["plain", "channels last", "expanded", "with gaps", "transposed"],
)
def test_strides_are_those_that_are_computed(operation, arrange):
    inputs = torch.rand(2, 3, 8, 8)
    program = record(Fn(lambda self, x: operation(arrange(x))), call_of(inputs))
    (result,) = next(n for n in program.graph.nodes if n.op == "output").args[0]
    assert result.meta["val"].stride() == operation(arrange(inputs)).stride()


def test_numbers_may_be_on_another_device():
    found = []

    def forward(self, x):
        found.extend([(self.scale * x).device, x.to(self.scale).device, (x * 2).device, x.cpu().device])
        return x

    record(Fn(forward, scale=nn.Parameter(torch.tensor(1.0))), call_of(torch.rand(3, device="meta")))
    assert [device.type for device in found] == ["meta", "cpu", "meta", "cpu"]


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


def test_types_are_those_of_the_model():
    model = Fn(lambda self, x: (x.half() @ self.w.half()).float(), w=weight(4, 3))
    (result,) = next(n for n in record(model, call_of(torch.rand(3, 4))).graph.nodes if n.op == "output").args[0]
    assert result.meta["val"].dtype == torch.float32


def test_a_parameter_that_is_returned_is_an_output():
    model = two_layers(lambda self, x: (self.last(self.first(x)), self.first.bias))
    record(model, call_of(torch.rand(3, 4)))
    assert not ob.symmetry(model, torch.rand(3, 4)).groups
