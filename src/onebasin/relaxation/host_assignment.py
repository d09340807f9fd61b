"""Exact assignment of one problem on the CPU, by `lapx` or SciPy, and prices that prove it."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def solve_on_host(scores: np.ndarray, where: str = "") -> np.ndarray:
    """The column of each row of an (m, n) problem in float64; `where` says in messages which problem it is."""
    if np.isfinite(scores.min()) and np.isfinite(scores.max()):
        return (_lapx_solver() or _scipy_solver)(-scores)
    for name, bad in (("NaN", np.isnan(scores)), ("+inf", np.isposinf(scores))):
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"assign takes scores that are finite, or -inf to forbid an entry, but {int(bad.sum())} of "
                f"{bad.size} are {name}, the first at {first}{where}."
            )
    try:
        return _scipy_solver(-scores)
    except ValueError as error:
        forbidden = np.isneginf(scores)
        raise ValueError(
            f"-inf forbids {int(forbidden.sum())} of {forbidden.size} entries and leaves no assignment{where}"
            ". Every set of k rows needs at least k columns to choose from; allow more entries."
        ) from error


def find_prices(scores: Tensor, columns: Tensor, prices: Tensor, tolerance: float) -> Tensor:
    """Prices of the columns under which the column of each row is its best one.

    Any prices do to begin with, near ones are faster. A column whose price is too low for the row of another one is
    raised; then the rows of the raised columns are looked at again. This ends if the assignment is the best one, because
    then no cycle gains anything.

    Args:
        scores: (m, n), float64.
        columns: (m,), an assignment with the largest sum.
        prices: (n,), to begin with. With more columns than rows these are zeros: a column without a row has no price.
        tolerance: raise no price by less, relative to the scores that were chosen and to the price itself.
    """
    m, n = scores.shape
    own = scores.gather(1, columns[:, None])[:, 0]
    row_of = torch.full((n,), -1).scatter(0, columns, torch.arange(m))
    prices, active, largest = prices.clone(), torch.arange(m), own.abs().amax()
    for _ in range(2 * n + 2):  # a path has n columns at most; rounding alone could go on
        base = prices[columns[active]] - own[active]
        wanted = ((scores if len(active) == m else scores[active]) + base[:, None]).amax(0)
        raised = (wanted - prices > tolerance * (wanted.abs() + largest)).nonzero()[:, 0]
        if not len(raised):
            break
        prices[raised] = wanted[raised]
        active = row_of[raised]
        active = active[active >= 0]
        if not len(active):
            break
    return prices


def _scipy_solver(costs: np.ndarray) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(costs)[1].astype(np.int64)


@functools.cache
def _lapx_solver() -> Callable[[np.ndarray], np.ndarray] | None:
    try:
        import lap
    except ImportError:
        return None

    if not hasattr(lap, "lapjvr"):
        return None

    def solve(costs: np.ndarray) -> np.ndarray:
        if costs.shape[0] != costs.shape[1]:
            return _scipy_solver(costs)
        try:
            rows, columns = lap.lapjvr(costs, return_cost=False)
        except ValueError:  # it refuses costs whose differences overflow, which SciPy takes
            return _scipy_solver(costs)
        if not np.array_equal(rows, np.arange(len(costs))):  # what comes back has changed between releases
            return _scipy_solver(costs)
        return np.asarray(columns, dtype=np.int64)

    return solve
