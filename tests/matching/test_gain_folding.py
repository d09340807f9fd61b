"""Gains are folded, whatever number they are one at."""

import re

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.matching.gain_folding import find_scale, fold_gains, read_gain
from onebasin.symmetries import Scale
from onebasin.tensors.states import StateDict

D = 8


class Norm(nn.Module):
    """RMSNorm that multiplies by a function of its weight."""

    def __init__(self, gain=lambda weight: 1 + weight):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(D)), gain

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain(self.weight)


def make(gain=lambda weight: 1 + weight) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, D), Norm(gain), nn.Linear(D, 2)).double()
    return model, torch.randn(4, 3, dtype=torch.float64)


def test_one_plus_the_weight_becomes_one():
    """Also where it is negative: the sign goes into what reads it."""
    model, x = make()
    assert bool((1 + model[1].weight < 0).any())
    symmetry = ob.symmetry(model, x, kinds="all")
    assert isinstance(find_scale(symmetry, "1.weight"), Scale)
    state = StateDict(model.state_dict())
    found = fold_gains(symmetry, state, {})
    assert (found.keys, found.left, found.is_positive) == (("1.weight",), {}, False)
    folded = state.map(found.move)
    assert bool((folded["1.weight"] == 0).all())
    expected = model(x)
    torch.testing.assert_close(torch.func.functional_call(model, dict(folded), x), expected, rtol=1e-10, atol=1e-12)
    again = fold_gains(symmetry, folded, {})
    assert (again.keys, again.left) == ((), {})


def test_positive_scales_are_all_that_is_done_to_positive_gains():
    model, x = make()
    nn.init.uniform_(model[1].weight, -0.5, 0.5)
    symmetry = ob.symmetry(model, x, kinds="all")
    state = StateDict(model.state_dict())
    found = fold_gains(symmetry, state, {})
    assert found.is_positive
    same = ob.Transform(symmetry.identity(), found.logarithms).apply(model)
    for key, value in state.items():
        torch.testing.assert_close(same[key], found.move(key, value))


@pytest.mark.parametrize("entry", [0.0, -1.0])
def test_a_gain_of_zero_stays(entry):
    model, x = make() if entry else make(lambda weight: weight)
    with torch.no_grad():
        model[1].weight[2] = entry
    symmetry = ob.symmetry(model, x, kinds="all")
    state = StateDict(model.state_dict())
    assert read_gain(symmetry, "1.weight", state)[2] == 0
    found = fold_gains(symmetry, state, {})
    assert found.left == {"1.weight": "some of the numbers that it multiplies by are zero"}


def test_functions_of_a_weight_are_not_folded_and_told():
    model, x = make(torch.exp)
    symmetry = ob.symmetry(model, x, kinds="all")
    state = StateDict(model.state_dict())
    assert read_gain(symmetry, "1.weight", state) is None
    found = fold_gains(symmetry, state, {})
    assert (found.keys, list(found.left)) == ((), ["1.weight"])
    assert found.left["1.weight"] == "units are multiplied by a function of it, and not by itself"
    (note,) = ob.canonical(model, x).notes
    assert note.startswith("The gain 1.weight stays")


def test_a_reason_that_is_known_is_given():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, 2)).double(), make()[1]
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    symmetry = ob.symmetry(model, x, kinds="all")
    state = StateDict(model.state_dict())
    found = fold_gains(symmetry, state, {})
    assert found.left == {"1.weight": "it cannot be multiplied without changing what reads it"}
    assert fold_gains(symmetry, state, {"1.weight": "of this"}).left == {"1.weight": "of this"}


class Returned(nn.Module):
    """Units behind a norm, of which some are returned."""

    def __init__(self, num_returned):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.num_returned = num_returned
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x):
        h = self.norm(self.first(x))
        return {"logits": self.last(h), "hidden": h[:, D - self.num_returned :]}


@pytest.mark.parametrize(
    ("num_returned", "reason"),
    [
        (D, r"its units are not free: model output \(hidden\)"),
        (1, "some of its units cannot be multiplied without changing what reads them"),
    ],
)
def test_a_gain_whose_units_are_returned_stays(num_returned, reason):
    torch.manual_seed(0)
    model, x = Returned(num_returned).double(), make()[1]
    form = ob.canonical(model, x)
    assert re.fullmatch(reason, form.left["norm.weight"])
    assert torch.allclose(form.model(x)["logits"], model(x)["logits"], rtol=1e-9)
