"""Modules that hide what they do: no symmetry is found that the module itself, run in float64, does not have."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.failures import NotRecordable
from onebasin.programs.recording import record
from tests.cases import Fn

pytestmark = pytest.mark.filterwarnings("ignore::onebasin.UnreachedWarning")  # no module uses all of its parameters


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(forward, **members):
    torch.manual_seed(0)
    members = {name: member() for name, member in members.items()}
    model = Fn(forward, first=nn.Linear(4, 8), last=nn.Linear(8, 2), scale=nn.Parameter(torch.ones(8)), **members)
    model.seen = model.scale.detach()
    model.viewed = model.scale.view(2, 4)
    model.register_buffer("fixed", torch.ones(8), persistent=False)
    model.table = torch.ones(8)
    model.numbers = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(8)])
    return model


def measure(forward, symmetry, **members):
    """The largest change of the module's own outputs, at random weights and inputs."""
    worst = 0.0
    for seed in range(3):
        one, other = make(forward, **members).eval(), make(forward, **members).eval()
        generator = torch.Generator().manual_seed(seed)
        for value in one.state_dict().values():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.1)
        other.load_state_dict(symmetry.random(generator).apply(one))
        inputs = torch.randn(3, 4, generator=generator)
        with torch.no_grad():
            for before, after in zip(flatten(one(inputs.clone())), flatten(other(inputs.clone())), strict=True):
                worst = max(worst, float((before - after).abs().max()))
    return worst


def flatten(result):
    return result if isinstance(result, tuple) else (result,)


def keep_a_detached_scale(self, x):
    return self.last(self.first(x) * self.seen)


def keep_a_view_of_the_scale(self, x):
    return self.last(self.first(x) * self.viewed.reshape(8))


def make_another_parameter(self, x):
    return self.last(self.first(x) * nn.Parameter(self.scale))


def make_another_class(self, x):
    return self.last(self.first(x) * self.scale.as_subclass(torch.Tensor))


def list_numbers(self, x):
    return self.last(self.first(x) * torch.tensor(list(self.numbers)))


def list_numbers_to_a_class(self, x):
    return self.last(self.first(x) * torch.Tensor(list(self.numbers)))


def list_numbers_to_new(self, x):
    return self.last(self.first(x) * x.new(list(self.numbers)))


def read_by_numpy(self, x):
    return self.last(self.first(x) * torch.from_numpy(np.array(self.kept) * 1))


def read_a_storage(self, x):
    return self.last(self.first(x) * torch.tensor(self.scale.storage().tolist()))


def share_a_storage(self, x):
    return self.last(self.first(x) * torch.tensor([]).set_(self.scale.untyped_storage()))


def run_in_a_thread(self, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(self.scale.detach() * 2))
    thread.start()
    thread.join()
    return self.last(self.first(x) * found[0])


def return_from_a_thread(self, x):
    found = []
    thread = threading.Thread(target=lambda: found.append((x @ self.first.weight.t()).detach()))
    thread.start()
    thread.join()
    return self.last(self.first(x)), found[0]


def write_a_constant_by_numpy(self, x):
    weights = torch.arange(8.0)
    h = self.first(x) * weights
    weights.numpy()[:] = 1
    return self.last(h * weights)


def replace_the_data_of_a_constant(self, x):
    weights = torch.arange(8.0)
    h = self.first(x) * weights
    weights.data = torch.ones(8)
    return self.last(h * weights)


def replace_the_data_of_a_parameter(self, x):
    self.scale.data = torch.arange(8.0)
    return self.last(self.first(x) * self.scale)


def catch_a_refusal(self, x):
    h = self.first(x)
    other = h[:, :4]
    h[:, 0] = 1.0
    try:
        return self.last(torch.cat([other, h[:, 4:]], 1))
    except Exception:
        return self.last(h)


def catch_that_there_is_no_value(self, x):
    h = self.first(x)
    try:
        h = h * torch.arange(8.0) if h.sum() < 1e9 else h
    except RuntimeError:
        h = h * 1.0
    except Exception:
        h = h * 2.0
    return self.last(h)


def copy_attention(self, x):
    h = self.first(x).view(1, 3, 2, 4).transpose(1, 2)
    h = F.scaled_dot_product_attention(h, h, h)
    copied = h.contiguous()  # a copy, since attention returns other strides
    copied.mul_(torch.arange(4.0))
    return self.last(h.transpose(1, 2).reshape(3, 8))


def write_a_cast(self, x):
    h = self.first(x)
    low = h.to(torch.bfloat16)
    low.mul_(2.0)
    return self.last(h), low.sum(1).double()


def write_a_kept_view(self, x):
    self.seen.mul_(1.5)
    return self.last(self.first(x) * self.scale)


def write_a_buffer_that_is_not_saved(self, x):
    self.fixed.fill_(2.0)
    return self.last(self.first(x) * self.fixed)


def write_an_attribute(self, x):
    self.table[0] = 2.0
    return self.last(self.first(x) * self.table)


def write_an_attribute_as_output(self, x):
    torch.add(torch.ones(8), 1.0, out=self.table)
    return self.last(self.first(x) * self.table)


# The sizes of the groups that the exporter finds; None where it refuses too.
REFUSED = {
    keep_a_detached_scale: None,
    keep_a_view_of_the_scale: None,
    make_another_parameter: [8],
    make_another_class: None,
    list_numbers: None,
    list_numbers_to_a_class: None,
    list_numbers_to_new: None,
    read_by_numpy: None,
    read_a_storage: None,
    share_a_storage: None,
    run_in_a_thread: None,
    return_from_a_thread: None,
    write_a_constant_by_numpy: None,
    replace_the_data_of_a_constant: [],
    replace_the_data_of_a_parameter: [],
    catch_a_refusal: [3, 4],
    copy_attention: [2, 4],
    write_a_kept_view: None,
    write_a_buffer_that_is_not_saved: [8],
    write_an_attribute: None,
    write_an_attribute_as_output: None,
    catch_that_there_is_no_value: None,
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_what_is_hidden_is_refused(forward):
    members = {"kept": lambda: torch.ones(8)}
    model = make(forward, **members)
    before = copy.deepcopy((model.state_dict(), model.fixed, model.table))
    inputs = torch.rand(3, 4)
    with pytest.raises(NotRecordable):
        record(model, read_calls(inputs)[0])
    assert str((model.state_dict(), model.fixed, model.table)) == str(before)
    if REFUSED[forward] is None:
        with pytest.raises(ValueError, match="cannot trace"):
            ob.symmetry(model, inputs)
    else:
        symmetry = ob.symmetry(model, inputs)
        assert [group.size for group in symmetry.groups.values()] == REFUSED[forward]
        assert measure(forward, symmetry, **members) < 1e-12
    assert str((model.state_dict(), model.fixed, model.table)) == str(before)


def branch_on_inference(self, x):
    h = self.first(x)
    return self.last(h if torch.is_inference_mode_enabled() else h * torch.arange(8.0))


def read_the_data(self, x):
    return self.last(self.first(x) * self.scale.data)


def copy_a_parameter(self, x):
    return self.last(self.first(x) * copy.deepcopy(self.scale))


def copy_a_module(self, x):
    return self.last(copy.deepcopy(self.first)(x) * self.scale)


def read_the_state(self, x):
    return self.last(self.first(x) * self.state_dict()["scale"])


def replace_a_parameter(self, x):
    self.scale = nn.Parameter(self.scale * torch.arange(8.0))
    return self.last(self.first(x) * self.scale)


def draw_a_mask(self, x):
    return self.last(self.first(x) * torch.bernoulli(torch.full((8,), 0.999)))


def draw_from_a_generator(self, x):
    return self.last(self.first(x) * torch.rand(8, generator=self.chance))


def differentiate(self, x):
    return torch.func.grad(lambda z: self.last(torch.tanh(self.first(z))).sum())(x)


def call_as_a_function(self, x):
    weights = {"weight": self.last.weight * 2, "bias": self.last.bias}
    return torch.func.functional_call(self.last, weights, (self.first(x),))


def drop_in_place(self, x):
    return self.last(F.dropout(self.first(x), 0.5, training=False, inplace=True))


# The sizes of the groups that a person counts.
RECORDED = {
    branch_on_inference: [],
    read_the_data: [8],
    copy_a_parameter: [8],
    copy_a_module: [8],
    read_the_state: [8],
    replace_a_parameter: [],
    draw_a_mask: [],
    draw_from_a_generator: [],
    differentiate: [8, 2],  # the sum that is differentiated is computed and dropped
    call_as_a_function: [8],
    drop_in_place: [8],
}


@pytest.mark.parametrize("forward", RECORDED, ids=lambda f: f.__name__)
def test_what_is_recorded_is_true(forward):
    members = {"chance": lambda: torch.Generator().manual_seed(1)}
    model, inputs = make(forward, **members), torch.rand(3, 4)
    record(model, read_calls(inputs)[0])
    symmetry = ob.symmetry(model, inputs)
    assert [group.size for group in symmetry.groups.values()] == RECORDED[forward]
    assert torch.equal(model.chance.get_state(), members["chance"]().get_state())
    if forward is not draw_a_mask:  # is not a function of its weights
        assert measure(forward, symmetry, **members) < 1e-12


def test_a_cast_is_written_alone():
    """In float64, where the check runs, a cast to lower precision is none."""
    model = make(write_a_cast).float()
    ob.symmetry(model, torch.rand(3, 4, dtype=torch.float32))


def test_constants_that_a_cache_keeps_can_be_trained_with():
    cache = {}

    def forward(self, x):
        return self.last(self.first(x) * cache.setdefault("mask", torch.arange(8.0)))

    model = make(forward)
    record(model, read_calls(torch.rand(3, 4))[0])
    model(torch.rand(3, 4)).sum().backward()


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.last(self.first(x)).masked_select(x[:, :2] > 0),
        lambda self, x: self.last(F.embedding(torch.tensor([9]), self.first.weight.t()[:, :8]) * 1.0),
    ],
    ids=["size", "index"],
)
def test_what_cannot_be_traced_is_told(forward):
    with pytest.raises(ValueError, match="cannot"):
        ob.symmetry(make(forward), torch.rand(3, 4))


def test_a_forward_derivative_is_refused_before_it_is_begun():
    """One that is not ended would keep the user from any other."""
    with pytest.raises(ValueError, match="cannot trace"):
        ob.symmetry(make(lambda self, x: torch.func.jvp(self.first, (x,), (x,))), torch.rand(3, 4))
    torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))


def test_parameters_without_entries():
    model = make(
        lambda self, x: self.last(torch.cat([self.first(x), self.nothing])), nothing=lambda: nn.Parameter(torch.ones(0, 8))
    )
    assert len(ob.symmetry(model, torch.rand(3, 4)).groups) == 1
