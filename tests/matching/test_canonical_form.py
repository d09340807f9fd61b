"""Gains are folded into the layers around them, and the function stays as it is."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.canonical_form import canonicalise
from onebasin.symmetries.verification import compare_models
from onebasin.tensors.states import LazyState, read_state
from tests.basis_networks import (
    MLP,
    Attention,
    D,
    Function,
    LayerScale,
    Model,
    RMSNorm,
    Tied,
    Windows,
    randomise_norms,
    with_gains,
)


def make(norm: type[nn.Module] = nn.LayerNorm) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    norms = [norm(D) for _ in range(3)]
    return with_gains(Model([Attention(), MLP()], norms)).eval(), torch.randn(2, 4, 3)


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_gains_become_one_and_the_function_stays(norm):
    model, x = make(norm)
    model = model.double()
    with torch.no_grad():
        model.norms[0].weight[2] *= -1
    before = {key: value.clone() for key, value in model.state_dict().items()}
    form = ob.canonical(model, x.double())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert form.folded == ("norms.0.weight", "norms.1.weight", "norms.2.weight")
    assert not form.left
    assert all(bool((form.state[key] == 1).all()) for key in form.folded)
    expected = model(x.double())
    model.load_state_dict(form.state)
    assert torch.allclose(model(x.double()), expected, rtol=1e-10, atol=1e-12)
    assert "centred" in {b.kind for b in ob.symmetry(model, x.double(), kinds="all").bases.values()} or norm is RMSNorm


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_the_fold_carries_differences_along(norm):
    """Whoever has trained the model further gets the canonical form of that."""
    model, x = make(norm)
    model, x = model.double(), x.double()
    form = ob.canonical(model, x)
    assert form.fold is not None
    difference = {k: 0.1 * torch.randn_like(v) for k, v in model.state_dict().items() if k not in form.folded}
    moved = form.fold.apply_difference(difference)
    folded = {key: value + moved[key] if key in moved else value for key, value in form.state.items()}
    model.load_state_dict({key: value + difference.get(key, 0) for key, value in model.state_dict().items()})
    expected = model(x)
    model.load_state_dict(folded)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)


def move_gains(norm: Any, *readers: Any) -> None:
    """Multiply a norm by random numbers, and divide what reads it by them."""
    factors = torch.rand_like(norm.weight) + 0.5
    for value in norm.parameters():
        value *= factors
    for reader in readers:
        reader.weight /= factors


def change_blocks(model: Any) -> None:
    attention, mlp = model.branches
    move_gains(model.norms[0], attention.q, attention.k, attention.v)
    move_gains(model.norms[1], mlp.first)
    move_gains(model.norms[2], model.head)
    model.embed.weight += torch.randn(3)
    mlp.second.weight += torch.randn(12)


def change_layer_scale(model: Any) -> None:
    """A constant of all units is divided by the gain that multiplies it before it is added."""
    move_gains(model.norm, model.branch.first)
    move_gains(model.last, model.head)
    factors, writer = torch.rand_like(model.gain) + 0.5, model.branch.second
    model.gain *= factors
    writer.weight /= factors[:, None]
    writer.bias /= factors
    writer.weight += torch.randn(12) / model.gain[:, None]
    model.embed.bias += 2


def change_windows(model: Any) -> None:
    move_gains(model.norm, model.attention.q, model.attention.k, model.attention.v)
    move_gains(model.merge, model.reduce)
    model.attention.o.bias += 2


@pytest.mark.parametrize(
    ("build", "shape", "change"),
    [
        (lambda: Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)]), (2, 4, 3), change_blocks),
        (LayerScale, (5, 3), change_layer_scale),
        (Windows, (2, 4, 4, 3), change_windows),
    ],
)
def test_networks_that_were_changed_by_hand_have_one_canonical_form(build, shape, change):
    """Gains moved between norms and what reads them, and constants added to all units."""
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(shape, dtype=torch.float64)
    randomise_norms(model, ob.symmetry(model, x, kinds="all").gains)
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    torch.testing.assert_close(other(x), model(x), rtol=1e-9, atol=1e-11)
    first, second = (ob.canonical(each, x) for each in (model, other))
    assert not first.left
    for key, value in first.state.items():
        torch.testing.assert_close(second.state[key], value, rtol=1e-9, atol=1e-9)


def test_the_model_is_a_copy_of_its_own():
    """It has the state, the class, the mode and the ties of what was given, and shares no tensor with it."""
    model, x = make()
    form = ob.canonical(model, x)
    assert type(form.model) is Model
    assert not form.model.training
    assert form.state.keys() == model.state_dict().keys()
    torch.testing.assert_close(form.model(x), model(x), rtol=1e-5, atol=1e-6)
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert own.isdisjoint(value.data_ptr() for value in form.state.values())
    assert form.notes == [
        "3 gains of norms were folded into the layers around them.",
        f"The mean over units, which nothing reads, was subtracted from {len(form.centred)} tensors.",
    ]
    tied = ob.canonical(Tied().eval(), torch.randint(0, 11, (2, 4))).model
    assert tied.head.weight is tied.embed.weight


def test_a_negative_gain_has_no_fold():
    model, x = make()
    with torch.no_grad():
        model.norms[0].weight[2] *= -1
    assert ob.canonical(model, x).fold is None


def test_a_model_without_gains_is_left_alone():
    model, x = Function(torch.relu), torch.randn(4, 3)
    form = ob.canonical(model, x)
    assert (form.folded, form.left) == ((), {})
    assert all(torch.equal(form.state[key], value) for key, value in model.state_dict().items())
    assert form.notes == []


def test_what_cannot_be_folded_is_left_with_a_reason():
    torch.manual_seed(0)
    tied = with_gains(Tied()).eval()
    form = ob.canonical(tied, torch.randint(0, 11, (2, 4)))
    assert form.folded == ()
    assert list(form.left) == ["norm.weight"]
    assert "head.weight, which is one tensor with another" in form.left["norm.weight"]
    assert "untie=True" in form.left["norm.weight"]
    assert "norm.weight" in repr(form)
    model, x = make()
    with torch.no_grad():
        model.norms[1].weight[0] = 0
    form = ob.canonical(model, x)
    assert form.left == {"norms.1.weight": "some of the numbers that it multiplies by are zero"}
    assert form.folded == ("norms.0.weight", "norms.2.weight")


def test_a_tied_head_gets_a_tensor_of_its_own_if_asked_for():
    torch.manual_seed(0)
    tied, x = with_gains(Tied()).double().eval(), torch.randint(0, 11, (2, 4))
    form = ob.canonical(tied, x, untie=True)
    assert (form.folded, form.left, form.untied) == (("norm.weight",), {}, ("head.weight",))
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(form.state["embed.weight"], tied.embed.weight)
    assert not torch.equal(form.state["head.weight"], form.state["embed.weight"])
    torch.testing.assert_close(form.model(x), tied(x), rtol=1e-9, atol=1e-12)
    assert form.model.head.weight is not form.model.embed.weight
    assert "orthogonal" in {basis.kind for basis in ob.symmetry(form.model, x, kinds="all").bases.values()}
    assert form.configuration == {"tie_word_embeddings": False}
    (note,) = (note for note in form.notes if "head.weight" in note)
    assert note.startswith("head.weight has a tensor of its own now, and is tied to no other: it needs tie_word_embeddings")
    assert ob.canonical(tied, x).configuration == {}


def test_tensors_stay_tied_where_that_hinders_nothing():
    """A gain of one, or a tie that the gain does not meet, is no reason to untie."""
    torch.manual_seed(0)
    x = torch.randint(0, 11, (2, 4))
    form = ob.canonical(Tied().eval(), x, untie=True)
    assert form.untied == ()
    assert form.state["head.weight"] is form.state["embed.weight"]
    model, x = make()
    assert ob.canonical(model, x, untie=True).untied == ()


def test_a_gain_that_stays_in_one_model_stands_in_the_way_for_all():
    (a, x), (b, _) = make(), make()
    with torch.no_grad():
        b.norms[1].weight[0] = 0
    copies, symmetry, notes = canonicalise([a, b], x, None)
    assert sorted(basis.kind for basis in symmetry.bases.values()) == ["linear", "linear"]
    assert any("norms.1.weight stays" in note for note in notes)
    assert [copy is model for copy, model in zip(copies, (a, b), strict=True)] == [False, False]


def test_each_model_has_a_gain_that_stays():
    """Two streams; in one model the first cannot be rotated, in the other the second."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    layers = [(nn.Linear(3, D), nn.LayerNorm(D), nn.Linear(D, 6), nn.LayerNorm(6), nn.Linear(6, 2)) for _ in range(2)]
    models = [nn.Sequential(*each).double().eval() for each in layers]
    with torch.no_grad():
        models[0][1].weight[0] = 0
        models[1][3].weight[0] = 0
    found = ob.align(models[0], to=models[1], example_inputs=x, kinds="all", scaling=ob.Scaling(steps=2))
    assert not found.matrices
    torch.testing.assert_close(found.model(x), models[0](x))
    torch.testing.assert_close(found.target(x), models[1](x))


def test_states_without_modules_are_refused():
    model, x = make()
    with pytest.raises(ValueError, match="give modules"):
        ob.align(model.state_dict(), to=model, example_inputs=x, kinds="all")


def test_a_balanced_form_is_smaller_and_computes_the_same():
    model, x = make(RMSNorm)
    model, x = model.double(), x.double()
    plain, balanced = (ob.canonical(model, x, balanced=flag) for flag in (False, True))
    sizes = [sum(float(v.square().sum()) for v in form.state.values()) for form in (plain, balanced)]
    assert sizes[1] < sizes[0]
    expected = model(x)
    model.load_state_dict(balanced.state)
    assert torch.allclose(model(x), expected, rtol=1e-10, atol=1e-12)


def test_gains_that_are_folded_stay_one_in_a_balanced_form():
    """Also those that no change of basis needs, which have a scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.uniform_(model[1].weight, 0.5, 2)
    x = torch.randn(5, 3).double()
    form = ob.canonical(model, x, balanced=True)
    assert form.folded == ("1.weight",)
    assert bool((form.model[1].weight == 1).all())
    made, read = form.model[3].weight.square().sum(1) + form.model[3].bias.square(), form.model[5].weight.square().sum(0)
    torch.testing.assert_close(made, read)
    torch.testing.assert_close(form.model(x), model(x), rtol=1e-10, atol=1e-12)


def gemma(kind: str, **changes):
    """A tiny model of the family, in float64, and its inputs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        use_cache=False,
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **changes},
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().eval(), {"input_ids": torch.arange(8)[None]}


def list_streams(model, inputs):
    bases = ob.symmetry(model, inputs, kinds="all").bases.values()
    return [basis.kind for basis in bases if "model.embed_tokens.weight" in basis.places]


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2"])
def test_norms_that_multiply_by_one_plus_the_weight_are_seen(kind):
    """Their weights are zero in a new model, which is a gain of one."""
    model, inputs = gemma(kind)
    form = ob.canonical(model, inputs)
    assert (form.folded, form.left) == ((), {})
    assert list_streams(model, inputs) == ["orthogonal"]


@pytest.mark.parametrize("tied", [False, True])
def test_gains_of_gemma_are_folded(tied):
    model, inputs = gemma("Gemma", tie_word_embeddings=tied)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
        assert parameter.dim() > 1 or "norm" in key
    form = ob.canonical(model, inputs, untie=tied)
    assert (len(form.folded), form.left, form.untied) == (3, {}, ("lm_head.weight",) * tied)
    assert all(bool((form.state[key] == 0).all()) for key in form.folded)
    assert list_streams(model, inputs) == ["signed"]
    assert list_streams(form.model, inputs) == ["orthogonal"]
    assert compare_models(form.model, model, inputs) < 1e-9  # with casts to float32 promoted


def test_gains_on_what_is_added_to_a_stream_stay_and_are_named():
    """Gemma 2 multiplies what a block adds to the stream by a gain, which nothing can take up."""
    model, inputs = gemma("Gemma2", tie_word_embeddings=False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    form = ob.canonical(model, inputs)
    assert len(form.folded) == 3
    added = [f"model.layers.0.{part}_layernorm.weight" for part in ("post_attention", "post_feedforward")]
    assert form.left == dict.fromkeys(added, "it cannot be multiplied without changing what reads it")
    assert compare_models(form.model, model, inputs) < 1e-9  # with casts to float32 promoted


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="module must be"):
        ob.canonical({}, torch.zeros(1, 3), module=3)  # type: ignore[arg-type]


def test_what_is_untied_in_one_model_is_untied_in_all():
    torch.manual_seed(0)
    plain, gained, x = Tied().eval(), with_gains(Tied()).eval(), torch.randint(0, 11, (2, 4))
    assert ob.canonical(plain, x, untie=True).untied == ()
    copies, symmetry, notes = canonicalise([plain, gained], x, None, untie=True)
    assert symmetry.ties == ()
    assert all(each.head.weight is not each.embed.weight for each in copies)
    for each, model in zip(copies, (plain, gained), strict=True):
        torch.testing.assert_close(each(x), model(x), rtol=1e-4, atol=1e-5)
    assert any("head.weight has a tensor of its own now" in note for note in notes)


class Reader:
    """Reads copies of tensors, and counts how many matrices that it has read are in memory."""

    def __init__(self, state):
        self.state, self.read, self.most = state, [], 0

    def __call__(self, key):
        found = self.state[key].clone()
        if found.dim() > 1:
            self.read = [each for each in self.read if each() is not None]
            self.read.append(weakref.ref(found))
            self.most = max(self.most, len(self.read))
        return found


def lazily(model: nn.Module) -> tuple[LazyState, Reader]:
    state = read_state(model)
    reader = Reader(state)
    return LazyState({key: value.to("meta") for key, value in state.shapes.items()}, reader), reader


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_lazy_states_are_folded_and_centred_tensor_by_tensor(norm, dtype):
    """The same bits as in memory; the module is one of the architecture with other weights."""
    model, x = make(norm)
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():
        model.norms[1].weight[2] *= -1
    (state, reader), other = lazily(model), make(norm)[0].to(dtype)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    form, expected = ob.canonical(state, x, module=other), ob.canonical(model, x)
    assert isinstance(form.model, LazyState)
    assert reader.most <= 2
    assert (form.folded, form.centred, form.notes) == (expected.folded, expected.centred, expected.notes)
    for key, value in expected.state.items():
        assert form.model[key].dtype == dtype
        assert torch.equal(form.model[key], value)
    other.load_state_dict(form.model.load())
    torch.testing.assert_close(other(x), model(x), **({"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {}))


@pytest.mark.parametrize("untie", [False, True])
def test_tied_keys_of_lazy_states(untie):
    """Both are read from one tensor; untied, each is what it is in memory."""
    torch.manual_seed(0)
    model, x = with_gains(Tied()).double().eval(), torch.randint(0, 11, (2, 4))
    state, _ = lazily(model)
    form, expected = ob.canonical(state, x, module=Tied().double(), untie=untie), ob.canonical(model, x, untie=untie)
    assert (form.untied, form.left, form.folded) == (expected.untied, expected.left, expected.folded)
    held = ob.canonical(read_state(model), x, module=Tied().double(), untie=untie)
    assert (held.model["head.weight"] is held.model["embed.weight"]) != untie
    for key, value in expected.state.items():
        assert torch.equal(form.model[key], value)
        assert torch.equal(held.model[key], value)


def test_what_a_state_needs_is_said():
    model, x = make()
    state, _ = lazily(model)
    with pytest.raises(ValueError, match="give module=, a module of its architecture"):
        ob.canonical(state, x)
    with pytest.raises(ValueError, match="balanced=True needs all tensors in memory"):
        ob.canonical(state, x, module=model, balanced=True)
    with pytest.raises(ValueError, match=r"module= has no 'embed\.weight', which the state has"):
        ob.canonical(state, x, module=Function(torch.relu))


def test_a_module_with_nan_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"'0.weight' of the model holds NaN"):
        ob.canonical(model, torch.randn(3, 4))
