import math

import pytest
import torch

from onebasin.tensors.distances import find_layer_distances
from onebasin.tensors.states import StateDict


def make_state(*values: float) -> StateDict:
    first, second = torch.tensor(values).float().split(2)
    return StateDict({"a.weight": first, "a.bias": second, "b": second, "count": torch.tensor(3)})


def test_tensors_of_a_layer_are_taken_together():
    found = find_layer_distances(make_state(2, 2, 2, 2), make_state(2, 5, 2, 6), make_state(2, 2, 2, 4))
    assert found.keys() == {"a", "b"}  # integers have no distance
    assert found["a"] == pytest.approx((5 / 4, 2 / 4))
    assert found["b"] == pytest.approx((4 / math.sqrt(8), 2 / math.sqrt(8)))


def test_the_aligned_model_may_have_a_target_of_its_own():
    given, moved = make_state(2, 2, 2, 2), make_state(1, 1, 1, 1)
    found = find_layer_distances(given, make_state(4, 4, 4, 4), moved, moved)
    assert found["a"] == (1.0, 0.0)


def test_tensors_of_zeros_have_no_relative_distance():
    zero = make_state(0, 0, 0, 0)
    assert all(math.isnan(value) for layer in find_layer_distances(zero, zero, zero).values() for value in layer)
