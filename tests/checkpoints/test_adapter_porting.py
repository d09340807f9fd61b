"""An adapter does on another base, in another basis and with other gains, what it does on its own."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import move_adapter
from onebasin.checkpoints.adapter_porting import find_folds
from onebasin.tensors.states import read_state
from tests.checkpoints.adapted_network import TOKENS


class Stream(nn.Module):
    """An embedding, attention in two heads and ReLU, each behind a layer norm of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(5, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.before, self.between, self.after = (nn.LayerNorm(8) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = (f(self.before(x)).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.last(self.after(x + self.down(torch.relu(self.up(self.between(x))))))


def with_state(model, state):
    result = copy.deepcopy(model)
    result.load_state_dict(state)
    return result


@pytest.fixture(scope="module")
def bases():
    """A network with gains, the same one in another basis and with other gains, and the transform of its canonical form."""
    torch.manual_seed(0)
    old = Stream().double().eval()
    for norm in (old.before, old.between, old.after):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    form = ob.canonical(old, TOKENS)
    assert len(form.folded) == 3
    assert form.centred
    transform = ob.Transform.random(ob.symmetry(with_state(old, form.state), TOKENS, kinds="all"))
    assert {basis.kind for basis in transform.symmetry.bases.values()} >= {"linear", "centred"}
    gains = {name: torch.randn(8) for name in form.fold.logarithms}
    unfold = ob.Transform(form.fold.permutation, gains)
    new = with_state(old, unfold.apply(transform.apply(form.state)))
    torch.testing.assert_close(new(TOKENS), old(TOKENS), rtol=1e-9, atol=1e-11)
    return old, new, transform


@pytest.fixture(scope="module")
def lora():
    torch.manual_seed(1)
    shapes = {"up": (12, 8), "down": (8, 12), "last": (2, 8), **dict.fromkeys("qkvo", (8, 8))}
    found = {}
    for name, (out, inputs) in shapes.items():
        found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(3, inputs, dtype=torch.float64)
        found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 3, dtype=torch.float64)
    found["base_model.model.embed.lora_embedding_A"] = torch.randn(3, 5, dtype=torch.float64)
    found["base_model.model.embed.lora_embedding_B"] = torch.randn(8, 3, dtype=torch.float64)
    return found


def merged(model, lora):
    state = dict(model.state_dict())
    for key in (key for key in lora if "_A" in key):
        name = key.removeprefix("base_model.model.").partition(".lora_")[0]
        product = lora[key.replace("_A", "_B")] @ lora[key]
        state[f"{name}.weight"] = state[f"{name}.weight"] + (product.T if "embedding" in key else product)
    return with_state(model, state)


def carry(adapter, transform, folds):
    moved = read_state(adapter).lazily()
    for each in (folds[0], transform, folds[1]):
        moved = move_adapter(each, moved)
    return moved.load()


def test_an_adapter_does_on_the_new_base_what_it_did(bases, lora):
    old, new, transform = bases
    moved = carry(lora, transform, find_folds(old, new, TOKENS))
    assert {key: value.shape for key, value in moved.items()} == {key: value.shape for key, value in lora.items()}
    expected = merged(old, lora)(TOKENS)
    torch.testing.assert_close(merged(new, moved)(TOKENS), expected, rtol=1e-9, atol=1e-11)
    assert (merged(new, lora)(TOKENS) - expected).abs().max() > 0.1
    assert (old(TOKENS) - expected).abs().max() > 0.1


def test_gains_below_zero_are_refused(bases):
    old, new, _ = bases
    flipped = copy.deepcopy(new)
    with torch.no_grad():
        flipped.between.weight[2] *= -1
    with pytest.raises(ValueError, match="a gain of the new base has entries below zero"):
        find_folds(old, flipped, TOKENS)
    with pytest.raises(ValueError, match="a gain of the old base has entries below zero"):
        find_folds(flipped, new, TOKENS)


def test_what_cannot_be_carried_is_refused(bases):
    old, new, transform = bases
    folds = find_folds(old, new, TOKENS)
    gain = {"base_model.model.after.modules_to_save.default.weight": old.after.weight.detach() + 0.1}
    with pytest.raises(ValueError, match="an adapter that has trained a gain cannot follow"):
        carry(gain, transform, folds)
    magnitude = {"base_model.model.up.lora_magnitude_vector": old.up.weight.detach().norm(dim=1)}
    with pytest.raises(ValueError, match=r"is a magnitude \(DoRA\)"):
        carry(magnitude, transform, folds)
