"""How many units agree by chance: p-values of counts of fixed points.

A uniformly random permutation of n units leaves k of them in place with probability D(n - k) / (k! (n - k)!), where D counts
the permutations without fixed points; so k or more do with probability at most 1 / k!.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

SMALLEST = 1e-300
"""P-values below this are given as this: smaller ones are beyond the range of the arithmetic."""
_MOST = 171
"""Counts beyond this are less probable than the smallest p-value."""


def tail(count: int, probabilities: np.ndarray, uniform: float) -> float:
    """The p-value of a count: larger counts are as extreme, and a share `uniform` of equal ones.

    With a uniformly random share it is uniform under the null hypothesis, although counts are whole numbers.

    Args:
        count: that was seen.
        probabilities: of each count under the null hypothesis, from zero on; those that are left out count as nothing.
        uniform: between 0 and 1.
    """
    if count >= len(probabilities):
        return SMALLEST
    # From the small end, so that nothing is lost.
    larger = float(np.sum(probabilities[:count:-1]))
    return min(max(larger + uniform * float(probabilities[count]), SMALLEST), 1.0)


@functools.lru_cache(maxsize=256)
def count_by_chance(size: int, num_members: int = 1, tolerance: float = 0.0) -> np.ndarray:
    """Probabilities of the number of units that agree by chance.

    Args:
        size: units of one member, which a random permutation moves.
        num_members: how many such permutations there are, all independent.
        tolerance: beyond chance, each unit agrees for another reason with this probability.

    >>> count_by_chance(2).tolist()
    [0.5, 0.0, 0.5]
    """
    signs = np.cumsum([(-1) ** i / math.factorial(i) for i in range(min(size, _MOST - 1) + 1)])
    derangements = [signs[min(i, len(signs) - 1)] for i in range(size + 1)]  # the share without fixed points, of i units
    one = np.array([derangements[size - k] / math.factorial(k) for k in range(min(size + 1, _MOST))])
    result = np.maximum(one, 0.0)
    single = result
    for _ in range(num_members - 1):
        result = np.convolve(result, single)[: _limit(num_members)]
    if tolerance:
        result = np.convolve(result, _binomial(size * num_members, tolerance))
    return result


def _limit(num_members: int) -> int:
    """Counts to keep: sums of many members reach further before they are improbable."""
    return _MOST + 4 * num_members


def _binomial(size: int, share: float) -> np.ndarray:
    counts = np.arange(size + 1)
    log_choices = [math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1) for k in counts]
    return np.exp(np.array(log_choices) + counts * math.log(share) + (size - counts) * math.log1p(-share))


def combine(p_values: Sequence[float]) -> float:
    """Fisher's combination of independent p-values; 1 if there are none.

    >>> round(combine([0.5, 0.5]), 3)
    0.597
    """
    if not p_values:
        return 1.0
    from scipy.stats import chi2

    statistic = -2.0 * sum(math.log(max(p, SMALLEST)) for p in p_values)
    return min(max(float(chi2.sf(statistic, 2 * len(p_values))), SMALLEST), 1.0)
