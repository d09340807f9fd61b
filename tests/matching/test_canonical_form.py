"""Gains are folded into the layers around them, and the function stays as it is."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.canonical_form import canonicalise
from tests.basis_networks import MLP, Attention, D, Function, Model, RMSNorm, Tied, with_gains


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
    assert form.left == {"norms.1.weight": "some of its entries are zero"}
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
    assert "head.weight has a tensor of its own now: it is tied to no other." in form.notes


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
