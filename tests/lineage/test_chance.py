"""Probabilities of counts agree with enumeration, p-values are uniform, and Fisher's method with its definition."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom, kstest

from onebasin.lineage.chance import SMALLEST, combine, count_by_chance, tail


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_counts_are_those_of_all_permutations(size):
    orders = list(itertools.permutations(range(size)))
    counts = Counter(sum(i == j for i, j in enumerate(order)) for order in orders)
    expected = [counts[k] / len(orders) for k in range(size + 1)]
    assert np.allclose(count_by_chance(size), expected, atol=1e-14)


def test_members_are_independent():
    one = count_by_chance(4)
    assert np.allclose(count_by_chance(4, 3), np.convolve(np.convolve(one, one), one))


def test_a_tolerance_adds_units_that_agree_for_another_reason():
    expected = np.convolve(count_by_chance(20), binom.pmf(np.arange(21), 20, 0.1))
    assert np.allclose(count_by_chance(20, 1, 0.1), expected)


@pytest.mark.parametrize("size", [16, 512])
@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_probabilities_sum_to_one(size, tolerance):
    assert np.isclose(count_by_chance(size, 2, tolerance).sum(), 1.0)


def test_tails_fall_like_factorials_to_the_smallest_number():
    assert np.isclose(tail(10, count_by_chance(64), 1.0), 1.114e-7, rtol=1e-3)
    assert tail(0, count_by_chance(64), 1.0) == pytest.approx(1.0)
    assert tail(512, count_by_chance(512), 1.0) == SMALLEST


def test_p_values_of_random_permutations_are_uniform():
    draws = np.random.default_rng(0)
    chances = count_by_chance(30)
    values = [tail(int((draws.permutation(30) == np.arange(30)).sum()), chances, draws.random()) for _ in range(2000)]
    assert kstest(values, "uniform").pvalue > 0.01


def test_fisher_of_one_is_itself_and_of_none_is_one():
    assert combine([0.2]) == pytest.approx(0.2)
    assert combine([]) == 1.0
    assert combine([1e-10, 1.0]) < 1e-8
    assert combine([0.0] * 3) == SMALLEST
