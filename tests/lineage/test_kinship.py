"""P-values are uniform on random networks, shared features and ties are not mistaken for kinship, and copies are found."""

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn

import onebasin as ob
from onebasin.lineage.chance import count_by_chance, tail
from onebasin.lineage.kinship import MAX_UNITS, Evidence, compare_order, compare_residuals
from onebasin.tensors.states import StateDict, read_state

X = torch.zeros(1, 40)
KEYS = ["0.weight", "2.weight"]


def mlp(width: int = 30, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(40, width), activation or nn.ReLU(), nn.Linear(width, 40))


SYMMETRY = ob.symmetry(mlp(), X)
GROUP = SYMMETRY.groups["0.weight"]


def order(a: StateDict, b: StateDict, seed: int = 0) -> Evidence:
    (found,) = compare_order(SYMMETRY, [GROUP], KEYS, a, b, torch.Generator().manual_seed(seed))
    return found


def residual(a: StateDict, b: StateDict, seed: int = 0, tolerance: float = 0.0) -> Evidence:
    found = compare_residuals(SYMMETRY, GROUP, KEYS, a, b, torch.Generator().manual_seed(seed), tolerance)
    assert found is not None
    return found


def draw(seed: int) -> StateDict:
    torch.manual_seed(seed)
    return read_state(mlp()).load()


def permuted(state: StateDict) -> StateDict:
    return SYMMETRY.random(torch.Generator().manual_seed(5)).apply(state)


def with_features(state: StateDict, features: Tensor) -> StateDict:
    """What both networks have learned: large, in a few directions, in another order in each network."""
    shared = features[torch.randperm(30)]
    return StateDict({**state, "0.weight": state["0.weight"] + shared, "2.weight": state["2.weight"] + shared.T})


@pytest.mark.parametrize("test", [order, residual])
def test_p_values_of_random_networks_are_uniform(test):
    values = [test(draw(2 * seed), draw(2 * seed + 1), seed).p_value for seed in range(300)]
    assert kstest(values, "uniform").pvalue > 0.01


def residual_with_tolerance(a: StateDict, b: StateDict, seed: int) -> Evidence:
    return residual(a, b, seed, 0.05)


@pytest.mark.parametrize("test", [order, residual_with_tolerance])
def test_features_that_both_have_learned_are_no_evidence(test):
    torch.manual_seed(0)
    features = torch.randn(30, 6) @ torch.randn(6, 40)
    values = []
    for seed in range(200):
        a, b = (with_features(draw(2 * seed + number), features) for number in range(2))
        values.append(test(a, b, seed).p_value)
    assert kstest(values, "uniform", alternative="greater").pvalue > 0.01  # none too small


def test_plain_matching_does_mistake_them():
    torch.manual_seed(0)
    features = torch.randn(30, 6) @ torch.randn(6, 40)
    a, b = (with_features(draw(number), features) for number in range(2))
    pairs = [ob.assign(one @ other.T) for one, other in ((a[k], b[k]) for k in ("0.weight",))]
    pairs += [ob.assign(a["2.weight"].T @ b["2.weight"])]
    assert (pairs[0] == pairs[1]).sum() > 20


def test_a_noisy_copy_is_found_in_place_and_reordered():
    a = draw(0)
    b = StateDict({key: value + 0.3 * value.std() * torch.randn_like(value) for key, value in a.items()})
    assert order(a, b).p_value < 1e-20
    assert order(a, permuted(b)).p_value > 1e-3
    assert residual(a, b).p_value < 1e-20
    assert residual(a, permuted(b)).p_value < 1e-20
    assert residual(a, permuted(b)).num_agreeing == 30


def test_units_that_cannot_be_told_apart_agree_by_chance_alone():
    zeros = StateDict({key: torch.zeros_like(value) for key, value in draw(0).items()})
    values = [order(zeros, zeros, seed).p_value for seed in range(200)]
    assert kstest(values, "uniform").pvalue > 0.01


def test_a_tolerance_makes_the_same_count_less_telling():
    a = draw(0)
    strict, lenient = (residual(a, permuted(a), tolerance=tolerance) for tolerance in (0.0, 0.1))
    assert strict.num_agreeing == lenient.num_agreeing == 30
    assert strict.p_value < lenient.p_value < 1e-18
    assert lenient.best == pytest.approx(tail(30, count_by_chance(30, 1, 0.1), 1.0))


def test_changed_signs_are_undone():
    model = mlp(activation=nn.Tanh())
    a = read_state(model).load()
    signs = torch.where(torch.rand(30) < 0.5, -1.0, 1.0)
    b = StateDict(a)
    b["0.weight"], b["0.bias"], b["2.weight"] = a["0.weight"] * signs[:, None], a["0.bias"] * signs, a["2.weight"] * signs
    generator = torch.Generator().manual_seed(0)
    found = compare_residuals(SYMMETRY, GROUP, KEYS, a, permuted(b), generator, 0.0, flipped=KEYS)
    assert found is not None
    assert found.num_agreeing == 30


def test_rows_that_are_too_short_are_not_tested():
    model = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 4))
    symmetry = ob.symmetry(model, torch.zeros(1, 3))
    state = read_state(model).load()
    generator = torch.Generator().manual_seed(0)
    assert compare_residuals(symmetry, symmetry.groups["0.weight"], KEYS, state, state, generator, 0.0) is None


def test_of_many_units_some_are_compared():
    model = nn.Sequential(nn.Linear(20, MAX_UNITS + 90), nn.ReLU(), nn.Linear(MAX_UNITS + 90, 4))
    symmetry = ob.symmetry(model, torch.zeros(1, 20))
    state, group = read_state(model).load(), symmetry.groups["0.weight"]
    moved = symmetry.random(torch.Generator().manual_seed(1)).apply(state)
    generator = torch.Generator().manual_seed(0)
    found = compare_residuals(symmetry, group, KEYS, state, moved, generator, 0.05)
    assert found is not None
    assert found.num_units == MAX_UNITS
    assert found.num_agreeing > 0.9 * MAX_UNITS
    (placed,) = compare_order(symmetry, [group], KEYS, state, state, generator)
    assert placed.num_agreeing == placed.num_units == MAX_UNITS


def test_families_are_tested_member_by_member():
    encoder = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True).eval()
    symmetry = ob.symmetry(encoder, torch.zeros(1, 3, 16))
    groups = [group for group in symmetry.groups.values() if "self_attn" in group.name]
    keys = [key for key in symmetry.layouts if "self_attn" in key]
    state = read_state(encoder).load()
    found = compare_order(symmetry, groups, keys, state, state, torch.Generator().manual_seed(0))
    assert {each.num_units for each in found} == {16}
    assert all(each.num_agreeing == 16 for each in found)
    assert all(each.p_value < 1e-4 for each in found)  # four members of four units
