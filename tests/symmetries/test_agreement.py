"""Outputs are compared entry by entry, and rounding is told from a difference."""

import pytest
import torch

from onebasin.symmetries.agreement import JITTER, amplification, is_close, relative_difference

HUGE = torch.finfo(torch.float64).min


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ([1.0, 1e-12], [1.0, 2e-12]),
        ([1.0, HUGE], [1.1, HUGE]),
        ([1.0, torch.inf], [1.1, torch.inf]),
        ([1.0, torch.inf], [1.0, -torch.inf]),
        ([1.0, torch.inf], [1.0, 5.0]),
        ([1.0, 5.0], [1.0, torch.inf]),
        ([1.0, torch.nan], [1.1, torch.nan]),
        ([1.0, 2.0], [1.0, torch.nan]),
        ([0.0, 0.0], [0.0, 1e-30]),
        ([1 + 1j, 1e-12j], [1 + 1j, 2e-12j]),
        ([1, 2], [1, 3]),
        ([True, False], [True, True]),
    ],
)
def test_one_entry_is_enough(expected, found):
    expected, found = [torch.tensor(expected)], [torch.tensor(found)]
    if expected[0].is_floating_point():
        expected, found = [expected[0].double()], [found[0].double()]
    assert is_close(expected, expected, 1e-9, expected)
    assert not is_close(expected, found, 1e-9)
    assert not is_close(expected, found, 1e-9, expected)
    assert relative_difference(expected, expected) == 0
    assert relative_difference(expected, found) > 0


def test_shapes_and_types_must_be_equal():
    assert not is_close([torch.ones(2)], [torch.ones(3)], 1e-9)
    assert not is_close([torch.ones(2)], [torch.ones(2).double()], 1e-9)
    assert is_close([torch.ones(0)], [torch.ones(0)], 1e-9)


def test_what_cancels_has_the_scale_of_its_noise():
    expected, found = torch.tensor([1.0, 1e-17]).double(), torch.tensor([1.0, 3e-17]).double()
    noise = expected + torch.tensor([JITTER, 1e-16])
    assert not is_close([expected], [found], 1e-9)
    assert is_close([expected], [found], 1e-9, [noise])
    assert not is_close([expected], [found + 1e-6], 1e-9, [noise])


def test_integers_that_rounding_changes_say_nothing():
    expected, found = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert is_close([expected], [found], 1e-9, [torch.tensor([1, 4])])
    assert not is_close([expected], [found], 1e-9, [torch.tensor([5, 2])])


def test_amplification_is_that_of_the_worst_tensor():
    quiet, loud = torch.ones(9).double(), torch.full((9,), 1e-12).double()
    assert amplification([quiet, loud], [quiet + 2 * JITTER, loud * (1 + 1e-6)]) == pytest.approx(1e-6 / JITTER)
    assert amplification([torch.zeros(3)], [torch.zeros(3)]) == 0
    assert amplification([torch.tensor([1, 2])], [torch.tensor([3, 4])]) == 0
