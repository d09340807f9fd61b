"""Planted answers: copies, changed copies, strangers, few units, more blocks; and what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.tensors.states import read_state
from tests.basis_networks import MLP, Attention, D, Model, with_gains

X = torch.zeros(1, 20)


def mlp(seed: int, width: int = 40) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def changed(model: nn.Module, share: float = 0.3) -> nn.Module:
    """A copy with noise of a share of the size of each parameter."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter += share * parameter.square().mean().sqrt() * torch.randn_like(parameter)
    return result


def moved(model: nn.Module, inputs: Tensor = X, kinds: str = "permutation", seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    if kinds == "permutation":
        result = copy.deepcopy(model)
        result.load_state_dict(ob.symmetry(model, inputs).random(generator).apply(model))
        return result
    result = ob.canonical(model, inputs).model
    symmetry = ob.symmetry(result, inputs, kinds=kinds)  # type: ignore[arg-type]
    result.load_state_dict(ob.Transform.random(symmetry, generator).apply(result))
    return result


@pytest.mark.parametrize("kinds", ["permutation", "all"])
def test_a_copy_is_the_same_function(kinds):
    a = mlp(0)
    found = ob.provenance(a, moved(a, kinds=kinds), X)
    assert found.relation == "same"
    assert found.transform is not None
    assert found.change is not None
    assert found.change < 1e-5
    assert "same function up to symmetry" in found.answer
    assert ob.provenance(a, copy.deepcopy(a), X).transform is None


def test_a_rotated_transformer_is_the_same_function():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    a = with_gains(Model([Attention(), MLP()], [nn.LayerNorm(D) for _ in range(3)])).eval().double()
    assert ob.provenance(a, moved(a, x, "all"), x).relation == "same"


def test_a_copy_with_other_statistics_is_derived():
    torch.manual_seed(0)
    x = torch.zeros(2, 20)
    a = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10)).eval()
    b = moved(a, x)
    b.get_buffer("1.running_var").mul_(2.0)
    assert ob.provenance(a, b, x).relation == "derived"


@pytest.mark.parametrize("kinds", ["permutation", "all"])
def test_a_changed_copy_is_derived(kinds):
    a = mlp(0)
    for b in (changed(a), moved(changed(a), kinds=kinds)):
        before = copy.deepcopy(b.state_dict())
        found = ob.provenance(a, b, X)
        assert found.relation == "derived"
        assert found.p_value < 1e-20
        assert found.layers.keys() == {"0.weight", "2.weight"}
        assert found.change == pytest.approx(0.3, abs=0.1)
        assert all(torch.equal(value, before[key]) for key, value in b.state_dict().items())
    assert found.p_values["order"] > 1e-4  # of the moved one
    assert found.transform is not None


def test_one_layer_of_a_stranger_is_found_and_named():
    a, b = mlp(0), mlp(1)
    b.load_state_dict({**b.state_dict(), "0.weight": a.state_dict()["0.weight"]})
    found = ob.provenance(a, b, X)
    assert found.relation == "derived"
    assert list(found.layers) == ["0.weight"]


def test_strangers_are_independent():
    found = ob.provenance(mlp(0), mlp(1), X)
    assert found.relation == "independent"
    assert found.p_value > 1e-3
    assert found.changes == {}
    assert str(found).startswith("Independent, as far as can be told: p = ")
    assert found.p_value == min(1.0, 2 * min(found.p_values.values()))


def test_with_few_units_it_cannot_tell():
    found = ob.provenance(mlp(0, 4), mlp(1, 4), X)
    assert found.relation == "unknown"
    assert any("units were reordered" in note or "so few units" in note for note in found.notes)


def test_states_and_lazy_states_are_compared_by_permutations():
    a, symmetry = mlp(0), ob.symmetry(mlp(0), X)
    b = moved(changed(a))
    whole = ob.provenance(a.state_dict(), b.state_dict(), symmetry=symmetry)
    lazy = ob.provenance(read_state(a).lazily(), read_state(b).lazily(), symmetry=symmetry)
    assert whole.relation == lazy.relation == "derived"
    assert whole.p_values == lazy.p_values
    assert lazy.changes == {}
    in_place = ob.provenance(read_state(a).lazily(), read_state(changed(a)).lazily(), symmetry=symmetry)
    assert in_place.change == pytest.approx(0.3, abs=0.1)
    copied = ob.provenance(read_state(a).lazily(), read_state(moved(a)).lazily(), symmetry=symmetry)
    assert copied.relation == "same"


class Residual(nn.Module):
    """Blocks around a stream."""

    def __init__(self, seed: int, num_blocks: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(30, 24), nn.Linear(24, 30)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("kinds", ["permutation", "all"])
def test_blocks_are_found_in_a_deeper_network(kinds):
    x = torch.zeros(1, 30)
    a, deep = Residual(0, 2), Residual(1, 3)
    deep.embed, deep.head = copy.deepcopy(a.embed), copy.deepcopy(a.head)
    deep.blocks[1], deep.blocks[2] = (copy.deepcopy(block) for block in a.blocks)
    b = moved(deep, x, kinds)
    for pair in ((a, b), (b, a)):
        found = ob.provenance(*pair, x)
        assert found.relation == "derived"
        best = {each.group: each for each in found.evidence if each.test == "residual" and each.group in found.layers}
        assert best["blocks.0.1.weight" if "blocks.0.1.weight" in best else "blocks.0.1"].other[0].startswith("blocks.1.")
    assert ob.provenance(Residual(2, 2), b, x).relation == "independent"


def test_what_does_not_fit_is_refused():
    a = mlp(0)
    with pytest.raises(ValueError, match="different architectures"):
        ob.provenance(a, mlp(0, 41), X)
    with pytest.raises(ValueError, match="example_inputs"):
        ob.provenance(a, mlp(1))
    with pytest.raises(ValueError, match="NaN"):
        ob.provenance(a, _with_nan(mlp(1)), X)
    with pytest.raises(ValueError, match="level"):
        ob.provenance(a, mlp(1), X, level=0.5)
    with pytest.raises(ValueError, match="tolerance"):
        ob.provenance(a, mlp(1), X, tolerance=1.0)
    with pytest.raises(ValueError, match="kinds"):
        ob.provenance(a, mlp(1), X, kinds="signs")  # type: ignore[arg-type]


def _with_nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = float("nan")
    return model


def test_data_can_tell_the_shapes():
    a = mlp(0)
    assert ob.provenance(a, moved(a), data=[(X, torch.zeros(1))]).relation == "same"


def test_the_same_seed_gives_the_same_answer():
    one, other = (ob.provenance(mlp(0), mlp(1), X, seed=3) for _ in range(2))
    assert one.evidence == other.evidence
