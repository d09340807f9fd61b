"""Rotations are found in closed form, heads are paired whatever their bases are."""

import copy

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.closest_transforms import distance
from onebasin.matching.transform_steps import TransformSteps
from tests.basis_networks import MLP, Attention, D, Model, RMSNorm
from tests.matching.transform_networks import CASES
from tests.matching.transform_networks import plant as plant_case


class Tokens(nn.Module):
    """Reads tokens, so that its stream is told by many vectors."""

    def __init__(self, norm: type[nn.Module], rotate: str = "", heads: int = 2):
        super().__init__()
        self.inner = Model([Attention(heads, rotate=rotate), MLP()], [norm(D) for _ in range(3)])
        self.inner.embed = nn.Embedding(40, D)
        self.inner.head = nn.Linear(D, 40)

    def forward(self, x):
        return self.inner(x)


def plant(
    norm: type[nn.Module], rotated: bool = True, rotate: str = "", heads: int = 2
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model, and the same one with units permuted and rotated at random, or mixed by any invertible matrices."""
    torch.manual_seed(0)
    model, x = Tokens(norm, rotate, heads).double().eval(), torch.randint(0, 40, (2, 5))
    symmetry = ob.symmetry(model, x, kinds="all")
    drawn = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    matrices = drawn.matrices
    if rotated:
        matrices = {n: torch.linalg.qr(m).Q if symmetry.bases[n].kind == "linear" else m for n, m in matrices.items()}
    moved = copy.deepcopy(model)
    moved.load_state_dict(ob.Transform(drawn.permutation, {}, matrices).apply(model))
    return model, moved, x


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_planted_rotations_are_undone_without_data(norm):
    model, moved, x = plant(norm)
    found = ob.align(moved, to=model, example_inputs=x, kinds="all", scaling=ob.Scaling(steps=0))
    assert found.method == "weight-matching"
    assert found.start_cost > 10
    assert found.cost < 1e-9 * found.start_cost
    assert len(found.matrices) == 3


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
def test_planted_invertible_matrices_are_undone_without_data(norm):
    model, moved, x = plant(norm, rotated=False)
    found = ob.align(moved, to=model, example_inputs=x, kinds="all", scaling=ob.Scaling(steps=0))
    assert found.cost < 1e-6 * found.start_cost


@pytest.mark.parametrize("rotate", ["halves", "interleaved", "part"])
def test_planted_rotary_bases_are_undone_without_data(rotate):
    model, moved, x = plant(RMSNorm, rotated=False, rotate=rotate)
    found = ob.align(moved, to=model, example_inputs=x, kinds="all", scaling=ob.Scaling(steps=0))
    assert any(basis.is_rotary for basis in found.transform.symmetry.bases.values())
    assert found.cost < 1e-6 * found.start_cost


@pytest.mark.parametrize("rotate", ["", "halves"])
def test_grouped_queries_are_ordered_after_their_keys_and_values(rotate):
    model, moved, x = plant(RMSNorm, rotated=False, rotate=rotate, heads=8)
    options = {"example_inputs": x, "kinds": "all", "scaling": ob.Scaling(steps=0)}
    found = ob.align(moved, to=model, method=ob.WeightMatching(max_sweeps=1), **options)
    assert found.converged
    assert found.cost < 1e-12 * found.start_cost


class Odd(nn.Module):
    """Layers of tanh, and a gate that no sign enters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 24)])
        self.gate, self.up, self.down = nn.Linear(24, 20), nn.Linear(24, 20), nn.Linear(20, 5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """Recurrent layers, in which the candidate of a unit may change its sign, and its gates may not."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.last = kind(6, 20, num_layers=2, batch_first=True), nn.Linear(20, 5)

    def forward(self, x):
        return self.last(self.inner(x)[0])


@pytest.mark.parametrize("method", ["weight-matching", "activation-matching"])
@pytest.mark.parametrize(
    ("make", "shape", "num_bases"),
    [(Odd, (6,), 4), (lambda: Gated(nn.LSTM), (4, 6), 2), (lambda: Gated(nn.GRU), (4, 6), 2)],
    ids=["tanh", "LSTM", "GRU"],
)
def test_planted_signs_are_undone(make, shape, num_bases, method):
    torch.manual_seed(0)
    model, x = make().double().eval(), torch.randn(3, *shape).double()
    symmetry = ob.symmetry(model, x, kinds="all")
    assert [basis.kind for basis in symmetry.bases.values()] == ["signed"] * num_bases
    drawn = ob.Transform.random(symmetry, torch.Generator().manual_seed(1))
    moved = copy.deepcopy(model)
    moved.load_state_dict(ob.Transform(drawn.permutation, {}, drawn.matrices).apply(model))
    data = [torch.randn(300, *shape).double()] if method == "activation-matching" else None
    options = {"example_inputs": x, "data": data, "method": method, "scaling": ob.Scaling(steps=0)}
    found = ob.align(moved, to=model, kinds="all", **options)
    assert found.cost < 1e-9 * found.start_cost
    assert ob.align(moved, to=model, **{**options, "scaling": None}).cost > 0.1 * found.start_cost


def test_planted_rotations_are_undone_from_activations():
    model, moved, _ = plant(RMSNorm)
    data = [torch.randint(0, 40, (16, 5), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    found = ob.align(moved, to=model, data=data, kinds="all", scaling=ob.Scaling(steps=0))
    assert found.method == "activation-matching"
    assert found.cost < 1e-6 * found.start_cost


@pytest.mark.parametrize("name", ["RMS norm, 3 inputs", "grouped queries, rotary, gates", "batch norm"])
def test_every_step_that_is_accepted_lowers_the_cost(name, monkeypatch):
    one, other = plant_case(CASES[name]), plant_case(CASES[name], seed=1)
    take, costs = TransformSteps.take_if_closer, []

    def watch(steps, *arguments):
        before = distance(steps.current, steps.problem.target, steps.problem.keys)
        if has_moved := take(steps, *arguments):
            costs.append((before, distance(steps.current, steps.problem.target, steps.problem.keys)))
        return has_moved

    monkeypatch.setattr(TransformSteps, "take_if_closer", watch)
    options = {"method": "weight-matching", "scaling": ob.Scaling(steps=0)}
    found = ob.align(other.target, to=one.target, symmetry=one.symmetry, **options)
    assert len(costs) > 3
    assert all(after < before for before, after in costs)
    assert found.cost == pytest.approx(costs[-1][1])
