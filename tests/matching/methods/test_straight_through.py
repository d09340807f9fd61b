"""The straight-through estimator: its projections, what it keeps, and when it stops."""

import pytest
import torch

import onebasin as ob
from onebasin.matching.methods.straight_through import StraightThrough
from tests.matching.planted import DATA, X, pair


def test_the_first_projection_is_weight_matching():
    a, b = pair()
    history = ob.align(b, to=a, example_inputs=X, method="ste", steps=1).history
    matched = ob.align(b, to=a, example_inputs=X, method="weight-matching", order="random", max_sweeps=10)
    assert [entry["hard"] for entry in history if "hard" in entry] == [pytest.approx(matched.cost)]


def test_the_best_projection_is_kept():
    a, b = pair()
    objective = ob.Midpoint(torch.nn.functional.cross_entropy)
    result = ob.align(b, to=a, example_inputs=X, method="ste", objective=objective, data=DATA, steps=15, lr=0.1)
    costs = [entry["hard"] for entry in result.history]
    assert len(set(costs)) > 1
    assert result.cost == pytest.approx(min(*costs, result.start_cost))
    assert [entry["best"] for entry in result.history] == [min(*costs[: i + 1], result.start_cost) for i in range(15)]


def test_it_stops_when_its_patience_ends():
    a, b = pair()
    result = ob.align(b, to=a, example_inputs=X, method="ste", steps=50, patience=3)
    costs = [entry["hard"] for entry in result.history]
    assert result.converged
    assert len(costs) == costs.index(min(costs)) + 1 + 4  # the last gain, and 4 steps without one
    assert not ob.align(b, to=a, example_inputs=X, method="ste", steps=2, patience=3).converged


@pytest.mark.parametrize("options", [{"steps": -1}, {"lr": 0}, {"max_sweeps": 0}, {"patience": -1}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a (whole )?number"):
        StraightThrough(**options)
