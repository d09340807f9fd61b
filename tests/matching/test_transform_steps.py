"""Steps are accepted if they bring the networks closer; lazy states take the same ones."""

import pytest
import torch

import onebasin as ob
from onebasin.matching import transform_steps
from onebasin.matching.closest_transforms import distance
from onebasin.matching.transform_steps import Step, TransformSteps
from onebasin.tensors.states import State
from tests.matching.transform_networks import CASES, make_problem, plant

PLANTED = plant(CASES["ReLU"])
IDENTITY = ob.Transform(PLANTED.symmetry.identity(), {})


def begin(is_lazy: bool = False) -> TransformSteps:
    source, target = (state.lazily() if is_lazy else state for state in (PLANTED.source, PLANTED.target))
    return TransformSteps(make_problem(PLANTED.symmetry, source, target), IDENTITY)


def differ(state: State) -> float:
    return distance(state, PLANTED.target, begin().problem.keys)


@pytest.mark.parametrize("held", [10**8, 0])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_step_that_undoes_the_transform_is_taken(is_lazy, held, monkeypatch):
    monkeypatch.setattr(transform_steps, "_HELD_ENTRIES", held)
    steps = begin(is_lazy)
    keys = list(steps.problem.keys)
    assert steps.measure() == pytest.approx(differ(PLANTED.source))
    before = steps.begin(keys)
    assert before.after.is_lazy == (is_lazy and not held)
    after = steps.extend(before, PLANTED.transform.inverse())
    assert steps.take_if_closer(before, after, keys)
    assert steps.current.is_lazy == is_lazy
    assert steps.is_equal
    for key in keys:
        torch.testing.assert_close(steps.total.apply(PLANTED.source)[key], PLANTED.target[key])


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_step_away_from_the_target_is_not_taken(is_lazy):
    steps = begin(is_lazy)
    keys = list(steps.problem.keys)
    first = steps.begin(keys)
    assert steps.take_if_closer(first, steps.extend(first, PLANTED.transform.inverse()), keys)
    before = steps.begin(keys)
    assert not steps.take_if_closer(before, steps.extend(before, PLANTED.transform), keys)
    assert steps.is_equal


def test_a_step_has_to_gain_the_share_that_is_asked_for():
    steps = begin()
    keys = list(steps.problem.keys)
    before = steps.begin(keys)
    logarithms = {name: value * 0.01 for name, value in PLANTED.transform.inverse().logarithms.items()}
    after = steps.extend(before, ob.Transform(PLANTED.symmetry.identity(), logarithms))
    share = 1 - differ(after.after) / differ(before.after)
    assert 0 < share < 1
    assert not steps.take_if_closer(before, after, keys, gain=1.1 * share)
    assert steps.take_if_closer(before, after, keys, gain=0.9 * share)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_going_back_undoes_all_steps(is_lazy):
    steps = begin(is_lazy)
    start = Step(steps.total, steps.current)
    first = steps.begin(list(steps.problem.keys))
    steps.take(steps.extend(first, PLANTED.transform.inverse()), steps.problem.keys)
    assert steps.measure() < 1e-20
    steps.go_back(start)
    assert steps.total is IDENTITY
    assert steps.measure() == pytest.approx(differ(PLANTED.source))


def test_steps_that_change_nothing_cost_nothing():
    steps = begin()
    before = steps.begin(list(steps.problem.keys))
    assert steps.extend(before, IDENTITY) is before
