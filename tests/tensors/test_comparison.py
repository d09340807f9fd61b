"""Differences between states are named, and so is what is not finite."""

import pytest
import torch
from torch import nn

from onebasin.tensors.comparison import check_alike, check_finite
from onebasin.tensors.states import read_state


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ({"w": torch.ones(2)}, {}, "B has no 'w', which A has"),
        ({}, {"w": torch.ones(2)}, "A has no 'w', which B has"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, r"'w' has shape \(2,\) in A and \(3,\) in B"),
        ({"w": torch.ones(2)}, {"w": "text"}, "'w' is a tensor in A and a str in B"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.int64)}, "'w' is torch.float32 in A and torch.int64 in B"),
    ],
)
def test_differences(first, other, message):
    with pytest.raises(ValueError, match=message):
        check_alike(read_state(first), read_state(other), "A", "B")


def test_types_of_floating_tensors_may_differ():
    check_alike(read_state({"w": torch.ones(2)}), read_state({"w": torch.ones(2).bfloat16()}), "A", "B")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_not_finite_is_named(value, lazy):
    good, bad = read_state(nn.Linear(2, 2)), read_state({"u": torch.ones(2), "v": torch.tensor([1.0, value])})
    with pytest.raises(ValueError, match="'v' of the second holds NaN or infinity"):
        check_finite({"the first": good, "the second": bad.lazily() if lazy else bad})


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.complex32, torch.complex64],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_nan_is_found_in_every_type(dtype):
    check_finite({"a": read_state({"w": torch.ones(3).to(dtype)})})
    with pytest.raises(ValueError, match="'w' of a holds NaN or infinity"):
        check_finite({"a": read_state({"w": torch.tensor([1.0, float("nan")]).to(dtype)})})


def test_sums_may_overflow():
    check_finite({"large": read_state({"w": torch.full((4,), 3e38)}), "narrow": read_state({"w": torch.ones(2).half()})})


def test_no_values_at_all():
    with pytest.raises(ValueError, match="the model is on the meta device"):
        check_finite({"the model": read_state(nn.Linear(2, 2, device="meta"))})
