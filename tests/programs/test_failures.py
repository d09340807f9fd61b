"""A failed trace is one sentence: what failed, the likely cause, what to do. Nothing is printed."""

import pytest
import torch
from torch import nn

import onebasin as ob
from tests.cases import two_layers

BY_HAND = "write the symmetry by hand with onebasin.Symmetry.from_axes and check it with verify"


def branch(self, x):
    h = self.first(x)
    if h.sum() > 0:
        h = -h
    return self.last(h)


def loop_over_experts(self, x):
    h = self.first(x)
    chosen = h.argmax(-1)
    for expert in range(8):
        if torch.where(chosen == expert)[0].numel():
            h = h + expert
    return self.last(h)


def select_samples(self, x):
    return self.last(self.first(x))[x[:, 0] > 0.5]


def catch_everything(self, x):
    h = self.first(x)
    try:
        h = h if h.sum() > 0 else -h
    except Exception:
        h = h * 2
    return self.last(h)


def complain(self, x):
    raise ValueError("expected images with 3 channels.\nMore about images.")


def return_an_object(self, x):
    return object()


def cast_a_module(self, x):
    """As a router does that computes in another type; here also with a branch that only an export takes."""
    first = self.first.to(torch.float64)
    mask = None if torch.compiler.is_exporting() else x
    return self.last(first(mask[:, :4].double()).float())


def pass_on(self, x):
    return self.last(self.first(x))


CAUSES = {
    branch: ["depends on values of tensors", "test_failures.py:15: if h.sum() > 0:", BY_HAND],
    loop_over_experts: ["depends on values of tensors", "test_failures.py:24: if torch.where", BY_HAND],
    select_samples: ["depends on values of tensors", "test_failures.py:30: return self.last(self.first(x))[", BY_HAND],
    catch_everything: ["it catches the error that a value cannot be read", BY_HAND],
    complain: ["with these example inputs", "ValueError: expected images with 3 channels;", "give inputs"],
    cast_a_module: ["_has_compatible_shallow_copy_type", "first = self.first.to(torch.float64)", BY_HAND],
    pass_on: ["with these example inputs: aten.linear.default failed", "give inputs that it accepts"],
    return_an_object: ["Found <class 'object'> in output", BY_HAND],
}


@pytest.mark.parametrize("forward", CAUSES, ids=lambda f: f.__name__)
def test_a_failed_trace_is_one_sentence(forward, capfd):
    with pytest.raises(ValueError, match=r"^cannot trace Fn") as error:
        ob.symmetry(two_layers(forward), torch.rand(3, 5 if forward is pass_on else 4))
    message = str(error.value)
    for part in CAUSES[forward]:
        assert part in message
    assert "\n" not in message
    assert len(message) < 400
    assert capfd.readouterr() == ("", "")


def differentiate(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.last(self.first(x).tanh()).sum(), x)[0]


def nest(self, x):
    return self.last(self.first(torch.nested.nested_tensor([x[:1], x[1:]]))).to_padded_tensor(0.0)


def pack(self, x):
    packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True)
    return self.last(self.first(packed.data))


def initialise(self, x):
    if not self.is_initialised:
        self.is_initialised.fill_(1)
    return self.last(self.first(x))


def cut(self, x):
    return self.last(self.first(x[: int(x.argmax()) + 1]))


def run_compiled(self, x):
    return self.last(self.compiled(self.first(x)))


def write_and_branch(self, x):
    h = self.first(x)
    h[:, 0] = 1.0
    if h.sum() > 0:
        h = -h
    return self.last(h)


LINES = {
    write_and_branch: "if h.sum() > 0:",
    nest: "return self.last(self.first(torch.nested.nested_tensor(",
    pack: "packed = nn.utils.rnn.pack_padded_sequence(",
    initialise: "if not self.is_initialised:",
    cut: "return self.last(self.first(x[: int(x.argmax()) + 1]))",
}


@pytest.mark.parametrize("forward", LINES, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_line_that_reads_a_value_is_named(forward, capfd):
    model = two_layers(forward, is_initialised=torch.tensor(0))
    with pytest.raises(ValueError, match=r"what it does depends on values of tensors \(test_failures.py:\d+: ") as error:
        ob.symmetry(model, torch.rand(3, 4))
    assert LINES[forward] in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_what_no_front_end_can_see_is_told(capfd):
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), {nn.Linear})
    compiled = two_layers(run_compiled, compiled=torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    for model, message in (
        (two_layers(differentiate), "it calls grad, which needs values; use torch.func.grad"),
        (compiled, "the operations of compiled, which is compiled by torch.jit, are not visible"),
        (quantised, "the weights of 0 are quantised and packed"),
    ):
        with pytest.raises(ValueError, match=f"cannot trace .*: {message}; write the symmetry by hand"):
            ob.symmetry(model, torch.rand(3, 4))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("form", [lambda w: w.t(), lambda w: w.t().contiguous(), lambda w: None])
def test_a_state_dict_that_holds_something_else_is_refused(form):
    """A permutation of what it holds would be another one of the parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def store(module, state, prefix, metadata):
        state[prefix + "weight"] = form(state[prefix + "weight"])

    model[2].register_state_dict_post_hook(store)
    with pytest.raises(ValueError, match=r"its state dict does not hold the parameter 2.weight, or not in the same form"):
        ob.symmetry(model, torch.rand(3, 4))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.rand(1, 4), torch.rand(1)), "its forward does not take them: too many positional arguments"),
        ({"y": torch.rand(1, 4)}, "its forward does not take them: missing a required argument: 'input'"),
    ],
)
def test_arguments_that_forward_does_not_take(inputs, message):
    with pytest.raises(ValueError, match="cannot trace Sequential with these example inputs") as error:
        ob.symmetry(nn.Sequential(nn.Linear(4, 2)), inputs)
    assert message in str(error.value)


def test_a_cache_among_the_outputs_is_told(capfd):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    capfd.readouterr()
    with pytest.raises(ValueError, match=r"returns a cache of past keys and values; turn that off"):
        ob.symmetry(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    assert capfd.readouterr() == ("", "")
