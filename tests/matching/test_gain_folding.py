"""Gains are folded, whatever number they are one at."""

import re

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.matching.gain_folding import find_scales, fold_gains, read_gain
from onebasin.tensors.states import StateDict, read_state

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
    assert len(find_scales(symmetry, "1.weight")) == 1
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


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_stays(entry):
    model, x = make()
    symmetry = ob.symmetry(model, x, kinds="all")
    with torch.no_grad():
        model[1].weight[2] = entry
    found = fold_gains(symmetry, StateDict(model.state_dict()), {})
    assert found.left == {"1.weight": "some of the numbers that it multiplies by are not finite"}


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


class Merged(nn.Module):
    """Four tokens are concatenated before their norm, as in Swin."""

    def __init__(self, num_read=4 * D):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, D), nn.LayerNorm(4 * D), nn.Linear(num_read, 2)
        self.num_read = num_read
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        h = self.norm(torch.cat([self.first(each) for each in x.unbind(1)], -1))
        return self.last(h[:, : self.num_read]), h[:, self.num_read :]


def test_a_norm_of_several_tokens_has_several_scales():
    """Each of the four has its own entries of the gain; they may be negative."""
    torch.manual_seed(0)
    model, x = Merged().double(), torch.randn(5, 4, 3, dtype=torch.float64)
    symmetry = ob.symmetry(model, x, kinds="all")
    assert len(find_scales(symmetry, "norm.weight")) == 4
    found = fold_gains(symmetry, read_state(model), {})
    assert (found.keys, found.negative, found.left) == (("norm.weight",), ("norm.weight",), {})
    form = ob.canonical(model, x)
    assert "centred" in {basis.kind for basis in ob.symmetry(form.model, x, kinds="all").bases.values()}
    torch.testing.assert_close(form.model(x), model(x), rtol=1e-9, atol=1e-12)


def test_a_gain_is_folded_as_a_whole_or_not_at_all():
    """What one of four tokens becomes is returned, so that the scales of three are left."""
    torch.manual_seed(0)
    model, x = Merged(3 * D).double(), torch.randn(5, 4, 3, dtype=torch.float64)
    form = ob.canonical(model, x)
    assert list(form.left) == ["norm.weight"]
    assert torch.equal(form.state["norm.weight"], model.norm.weight)


def test_the_entries_of_a_gain_need_numbers_of_their_own():
    """Tokens that are flattened have one scale for each unit, and a gain for each unit of each token."""
    torch.manual_seed(0)
    first, norm, last = nn.Linear(3, D), nn.LayerNorm(4 * D), nn.Linear(4 * D, 2)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    model = nn.Sequential(first, nn.Flatten(), norm, last).double()
    form = ob.canonical(model, torch.randn(5, 4, 3, dtype=torch.float64))
    assert form.left == {"2.weight": "several of its units can be multiplied by the same number alone"}


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize(
    ("between", "is_folded"), [(nn.Identity(), True), (Square(), True), (nn.BatchNorm1d(D), False), (nn.ReLU(), False)]
)
def test_signs_go_where_nothing_tells_them_apart(between, is_folded):
    """A square takes them away. A ReLU lets positive factors through alone, and a batch norm divides by these alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, D), nn.LayerNorm(D), between, nn.Linear(D, 2)).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    assert ob.canonical(model, x).folded == ("1.weight",)
    with torch.no_grad():
        model[1].weight[3] *= -1
    form = ob.canonical(model, x)
    assert form.folded == ("1.weight",) * is_folded
    assert ["negative" in reason for reason in form.left.values()] == [True] * (not is_folded)
    assert "0.weight" in form.centred
    torch.testing.assert_close(form.model(x), model(x), rtol=1e-9, atol=1e-12)
