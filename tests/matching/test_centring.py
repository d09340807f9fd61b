"""A mean over units that nothing reads is subtracted, and no other."""

import copy

import torch
from torch import nn

import onebasin as ob
from tests.basis_networks import MLP, Attention, D, Function, LayerScale, Model, RMSNorm, Tied, Windows, with_gains

KEYS = "{}.k.weight"
"""What a norm without a gain adds to all keys along the vector of ones is the offset's, and the same for all tokens: no
softmax sees it."""


def shifted(model: nn.Module, keys: list[str], axis: int) -> nn.Module:
    """A copy in which a random constant is added to all units along an axis of some tensors."""
    result = copy.deepcopy(model)
    state = result.state_dict()
    for key in keys:
        state[key] += 3 * torch.randn_like(state[key].sum(axis, keepdim=True))
    return result


def test_networks_that_differ_in_a_constant_of_all_units_become_equal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    other = shifted(model, ["0.weight", "0.bias"], 0)
    torch.testing.assert_close(other(x), model(x))
    found = ob.align(other, to=model, example_inputs=x, kinds="all")
    assert found.start_cost < 1e-20
    assert found.cost < 1e-20
    assert any("was subtracted from 2 tensors" in note for note in found.notes)
    torch.testing.assert_close(found.target(x), model(x))


def test_what_writes_the_stream_of_layer_norms_is_centred():
    torch.manual_seed(0)
    model = with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)])).double().eval()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    writers = [f"{name}.{kind}" for name in ("embed", "branches.0.o", "branches.1.second") for kind in ("weight", "bias")]
    forms = [ob.canonical(each, x) for each in (model, shifted(model, writers, 0))]
    for form in forms:
        assert set(form.centred) == {*writers, KEYS.format("branches.0")}
        assert not form.uncentred
        assert all(float(form.state[key].mean(0).abs().max()) < 1e-14 for key in writers)
    for key, value in forms[0].state.items():
        torch.testing.assert_close(forms[1].state[key], value, rtol=1e-9, atol=1e-12)
    expected = model(x)
    model.load_state_dict(forms[1].state)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-12)
    assert not ob.canonical(model, x).centred


def test_embeddings_and_positions_are_centred_along_their_second_axis():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(7, D), nn.Parameter(torch.randn(1, 4, D))
            self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 2)

        def forward(self, x):
            return self.head(self.norm(self.tokens(x) + self.places))

    form = ob.canonical(Tokens(), torch.randint(0, 7, (2, 4)))
    assert set(form.centred) == {"tokens.weight", "places"}
    assert float(form.state["tokens.weight"].mean(1).abs().max()) < 1e-6
    assert float(form.state["places"].mean(2).abs().max()) < 1e-6


def test_a_mean_that_something_reads_stays():
    """A linear head on the raw stream reads it, an RMSNorm what was written before it, a tied head its own."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3)
    raw = with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(2)])).eval()
    form = ob.canonical(raw, x)
    assert form.centred == (KEYS.format("branches.0"),)
    assert set(form.uncentred) >= {"embed.weight", "embed.bias", "branches.1.second.weight"}
    assert "some layer that reads them does not subtract it" in form.uncentred["embed.weight"]
    assert "embed.weight" in repr(form)
    norms = [nn.LayerNorm(D), RMSNorm(), nn.LayerNorm(D)]
    form = ob.canonical(with_gains(Model([Attention(), MLP()], norms)).eval(), x)
    assert form.centred == (KEYS.format("branches.0"), "branches.1.second.weight", "branches.1.second.bias")
    assert list(form.uncentred) == ["embed.weight", "embed.bias", "branches.0.o.weight", "branches.0.o.bias"]
    tied = Tied()
    tied.norm = nn.LayerNorm(D)  # type: ignore[assignment]
    form = ob.canonical(with_gains(tied).eval(), torch.randint(0, 11, (2, 4)))
    assert form.centred == ("branch.second.weight", "branch.second.bias")
    assert "one tensor with head.weight" in form.uncentred["embed.weight"]


def scaled(last: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = LayerScale(last).double()
    nn.init.uniform_(model.gain, 0.1, 1)
    return model, torch.randn(5, 3, dtype=torch.float64)


def test_what_is_multiplied_by_a_gain_before_it_is_added_is_centred():
    """Once the gain is folded into it, its mean is read by nothing."""
    model, x = scaled(nn.LayerNorm(D))
    form = ob.canonical(model, x)
    assert {"branch.second.weight", "branch.second.bias"} < set(form.centred)
    assert (form.folded, form.uncentred) == (("gain",), {})
    torch.testing.assert_close(form.model(x), model(x), rtol=1e-9, atol=1e-12)
    other = shifted(form.model, ["embed.weight", "branch.second.weight", "branch.second.bias"], 0)
    found = ob.align(other, to=form.model, example_inputs=x, kinds="all")
    assert found.start_cost < 1e-20


def test_what_is_multiplied_by_a_gain_that_stays_is_not_centred():
    model, x = scaled(nn.LayerNorm(D))
    with torch.no_grad():
        model.gain[0] = 0
    form = ob.canonical(model, x)
    assert list(form.left) == ["gain"]
    assert "embed.weight" in form.centred
    assert "branch.second.weight" not in form.centred


def test_what_a_stream_without_a_norm_is_made_of_keeps_its_mean():
    form = ob.canonical(*scaled(nn.Identity()))
    assert (form.folded, form.centred) == (("gain",), ())


def test_after_a_norm_branches_are_centred_and_the_stream_is_not():
    torch.manual_seed(0)
    model = with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(2)], "post")).eval()
    form = ob.canonical(model, torch.randn(2, 4, 3))
    branches = ("branches.0.o", "branches.1.second")
    assert form.centred == tuple(f"{branch}.{kind}" for branch in branches for kind in ("weight", "bias"))


def test_a_norm_over_four_tokens_at_once_leaves_the_constants_of_all_tokens():
    """Patch merging subtracts a mean over units and tokens: what differs from token to token is read."""
    torch.manual_seed(0)
    form = ob.canonical(with_gains(Windows()).eval(), torch.randn(2, 4, 4, 3))
    assert form.centred == ("embed.bias", KEYS.format("attention"), "attention.o.bias")


def test_a_step_that_a_gradient_does_not_see_keeps_the_mean():
    class Step(nn.Module):
        def forward(self, x):
            return nn.functional.layer_norm(x, (D,)) * (x.mean(-1, keepdim=True) > 0)

    torch.manual_seed(0)
    assert "first.weight" not in ob.canonical(Function(Step()), torch.randn(8, 3)).centred


def test_a_model_without_gradients_keeps_its_means_and_says_so():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.write, self.branch, self.read = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))

        def forward(self, x):
            stream = self.write(x)
            stream = stream + self.branch(self.norms[0](stream))
            return torch.special.zeta(self.read(self.norms[1](stream)).exp() + 1, torch.tensor(2.0))

    torch.manual_seed(0)
    form = ob.canonical(Detached(), torch.randn(4, 3))
    assert not form.centred
    assert form.uncentred.keys() >= {"write.weight", "branch.weight"}
    assert all("cannot be differentiated" in why for why in form.uncentred.values())


def test_a_mean_too_large_for_float64_stays_with_a_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    with torch.no_grad():
        model[0].weight += 1e12
    form = ob.canonical(model, torch.randn(4, 3, dtype=torch.float64))
    assert not form.centred
    assert "so large" in form.uncentred["0.weight"]
    assert torch.equal(form.state["0.weight"], model[0].weight)
