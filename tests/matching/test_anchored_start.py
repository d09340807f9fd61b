"""Planted transforms of every kind are undone by one sweep, in random networks and in trained ones."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching import transform_steps
from onebasin.matching.anchored_start import AnchoredStart, order_sets
from onebasin.matching.closest_transforms import ClosestTransforms
from onebasin.matching.methods.basis_matching import with_pairs
from onebasin.matching.transform_steps import TransformSteps
from onebasin.matching.unit_pairs import UnitPairs
from onebasin.relaxation.hardening import joint_groups
from onebasin.tensors.states import LazyState
from tests.basis_networks import Recurrent, RMSNorm
from tests.matching.transform_networks import CASES, Planted, make_problem, plant, stream

OPTIONS = {"method": "weight-matching", "detect_copy": False, "scaling": ob.Scaling(steps=0)}
NUM_SEEDS = 10


def check_undone(planted: Planted) -> None:
    """Every weight is the target's to 1e-6 after one sweep, and so is the function."""
    target = planted.target
    found = ob.align(planted.source, to=target, symmetry=planted.symmetry, **OPTIONS)
    assert found.start_cost > 1
    assert [entry["sweep"] for entry in found.history if "sweep" in entry] == [0]
    for key, value in target.items():
        if value.is_floating_point():
            assert (found.model[key] - value).norm() <= 1e-6 * value.norm(), key
    moved = copy.deepcopy(planted.model)
    moved.load_state_dict(found.model)
    torch.testing.assert_close(moved(planted.inputs), planted.model(planted.inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_planted_transforms_are_undone(name):
    first = plant(CASES[name])
    assert first.symmetry.bases or first.symmetry.scales
    check_undone(first)
    for seed in range(1, NUM_SEEDS):
        check_undone(plant(CASES[name], seed, symmetry=first.symmetry))


TRAINED = ["layer norm, 1 input", "RMS norm after branches", "grouped queries, rotary, gates", "batch norm", "LSTM", "tanh"]


@pytest.mark.parametrize("name", TRAINED)
def test_planted_transforms_of_trained_networks_are_undone(name):
    symmetry = None
    for seed in range(NUM_SEEDS):
        planted = plant(CASES[name], seed, trained=True, symmetry=symmetry)
        check_undone(planted)
        symmetry = planted.symmetry


def begin(planted: Planted) -> AnchoredStart:
    problem = make_problem(with_pairs(planted.symmetry), planted.source, planted.target)
    closest = ClosestTransforms(problem.symmetry)
    steps = TransformSteps(problem, ob.Transform(problem.symmetry.identity(), {}))
    return AnchoredStart(steps, closest, UnitPairs(closest), order_sets(problem, joint_groups(problem.symmetry)))


def test_right_steps_may_raise_the_distance():
    """If all units of the next group have changed their signs, the right order makes the tensors between them opposites."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        model[2].weight.mul_(10)
    x = torch.randn(3, 4, dtype=torch.float64)
    symmetry = ob.symmetry(model, x, kinds="all")
    order = ob.Permutation(symmetry, {"0.weight": torch.arange(8).roll(1), "2.weight": torch.arange(8)})
    first, second = symmetry.bases
    planted = Planted(model, x, symmetry, ob.Transform(order, {}, {first: torch.ones(8), second: -torch.ones(8)}))
    start = begin(planted)
    distances = [start.steps.measure()]
    decide = start._decide

    def decide_and_measure(groups, keys):
        decided = decide(groups, keys)
        distances.append(start.steps.measure())
        return decided

    start._decide = decide_and_measure
    start.build()
    assert len(distances) == 3
    assert distances[1] > 1.2 * distances[0]
    assert start.steps.is_equal
    check_undone(planted)


def test_a_basis_is_known_in_part_until_its_neighbours_are():
    """One input, the biases of what writes and the head span seven of eight directions, before units tell the last."""
    start = begin(plant(lambda: stream(RMSNorm, inputs=1)))
    ranks: list[float] = []

    def observe(groups, keys, state):
        ranks.append(sum(known.rank / 2 for known in start.known.values()))
        return True

    start.observe = observe
    assert start.build() == len(start.sets)
    assert ranks == pytest.approx([0, 7, 0, 0])
    assert not start.known
    assert start.steps.is_equal


def test_units_are_not_told_apart_by_biases_alone():
    """The stream comes first, though every other set has biases that stand beside no other group."""
    start = begin(plant(CASES["many branches, biases of zero"]))
    assert [group.name for group in start.sets[0][0]] == ["embed"]


def test_sets_that_are_not_to_be_decided_stay():
    planted = plant(CASES["ReLU"])
    start = begin(planted)
    start.observe = lambda groups, keys, state: False
    assert start.build() == 0
    assert start.steps.total.is_identity
    assert start.decided >= planted.symmetry.groups.keys()


def test_without_stretching_scales_stay():
    start = begin(plant(CASES["ReLU"]))
    start.is_stretched = False
    start.build()
    assert not any(bool(value.any()) for value in start.steps.total.logarithms.values())


class Uniform(nn.Module):
    """Recurrent units that inputs and outputs do not tell apart."""

    def __init__(self):
        super().__init__()
        self.inner = Recurrent(nn.RNN)
        with torch.no_grad():
            inner = self.inner.inner
            for value in (inner.weight_ih_l0, inner.bias_ih_l0, inner.bias_hh_l0, self.inner.last.weight):
                value.fill_(0.5)

    def forward(self, x):
        return self.inner(x)


def test_units_that_nothing_anchors_are_brought_no_further_away():
    """To find them is to tell whether two graphs are the same, from the weights between the units: no sweep promises it."""
    for seed in range(NUM_SEEDS):
        planted = plant(lambda: (Uniform(), torch.randn(2, 4, 3)), seed)
        found = ob.align(planted.source, to=planted.target, symmetry=planted.symmetry, **OPTIONS)
        assert found.cost <= found.start_cost
        moved = copy.deepcopy(planted.model)
        moved.load_state_dict(found.model)
        torch.testing.assert_close(moved(planted.inputs), planted.model(planted.inputs))


@pytest.mark.parametrize("name", TRAINED)
def test_networks_that_are_not_copies_are_brought_closer(name):
    one, other = plant(CASES[name]), plant(CASES[name], seed=1)
    found = ob.align(other.target, to=one.target, symmetry=one.symmetry, **OPTIONS)
    assert found.cost < found.start_cost


@pytest.mark.parametrize("held", [10**8, 0])
def test_lazy_states_are_read_tensor_by_tensor(held, monkeypatch):
    monkeypatch.setattr(transform_steps, "_HELD_ENTRIES", held)
    planted = plant(CASES["grouped queries, rotary, gates"])
    symmetry, source, target = planted.symmetry, planted.source, planted.target
    reads: Counter[str] = Counter()

    def lazily(state):
        def read(key):
            reads[key] += state is source
            return state[key]

        return LazyState({key: value.to("meta") for key, value in state.items()}, read)

    found = ob.align(lazily(source), to=lazily(target), symmetry=symmetry, **OPTIONS)
    assert isinstance(found.model, LazyState)
    # The cost before and after, twice each, once more without scales, and once or twice to decide its groups.
    assert held == 0 or max(count for key, count in reads.items() if key not in symmetry.fixed) <= 7, reads
    assert [entry["sweep"] for entry in found.history if "sweep" in entry] == [0]
    for key, value in target.items():
        torch.testing.assert_close(found.model[key], value, rtol=1e-6, atol=1e-6)
