"""Scores to a hard permutation: exact maximum assignment."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_LAPX_FROM = 128  # below, SciPy is as fast


def assign(scores: Tensor) -> Tensor:
    """Choose one column for each row, all different, so that the sum of their scores is the largest possible.

    Where the best columns of the rows are all different they are the answer, and nothing is solved. Otherwise
    each problem is solved exactly, in float64 on the CPU, by SciPy, or by `lapx` where it is installed and
    faster.

    Args:
        scores: (*batch, n, n) real numbers. -inf forbids an entry. Ties are broken in an unspecified way.

    Returns:
        The column of each row, (*batch, n), int64, on the device of the scores.

    Raises:
        ValueError: The matrices are not square, a score is NaN or +inf, or -inf leaves no assignment.
        TypeError: The scores are not a tensor of real numbers.

    Example:
        >>> import torch
        >>> assign(torch.tensor([[3.0, 2.0], [3.0, 0.0]]))
        tensor([1, 0])
    """
    if not isinstance(scores, Tensor) or scores.is_complex() or scores.dtype == torch.bool:
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"assign takes a tensor of real scores, but got {kind}.")
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(
            f"assign takes scores of shape (*batch, n, n), but got {tuple(scores.shape)}. "
            "Pad a rectangular problem with zeros to a square one."
        )
    scores, n = scores.detach(), scores.shape[-1]
    if scores.numel() == 0:
        return torch.empty(scores.shape[:-1], dtype=torch.int64, device=scores.device)
    top, best = scores.max(-1)  # NaN and +inf win, so the maxima tell of them
    settled = (best.sort(-1).values == torch.arange(n, device=scores.device)).all(-1)
    settled = (settled & top.isfinite().all(-1)).cpu()
    if settled.all():
        return best
    result = best.cpu()
    for index in (~settled).nonzero().tolist():
        problem = scores[tuple(index)].to("cpu", torch.float64).numpy()
        result[tuple(index)] = torch.from_numpy(_solve(problem, tuple(index)))
    return result.to(scores.device)


def _solve(scores: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    place = f" (problem {index} of the batch)" if index else ""
    for name, bad in (("NaN", np.isnan(scores)), ("+inf", np.isposinf(scores))):
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"assign takes scores that are finite, or -inf to forbid an entry, but {int(bad.sum())} of "
                f"{bad.size} are {name}, the first at {first}{place}."
            )
    forbidden = np.isneginf(scores)
    if forbidden.any():
        return _solve_forbidden(scores, forbidden, place)
    return _fastest_solver(len(scores))(-scores)


def _solve_forbidden(scores: np.ndarray, forbidden: np.ndarray, place: str) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment

    try:
        return linear_sum_assignment(scores, maximize=True)[1].astype(np.int64)
    except ValueError as error:
        raise ValueError(
            f"-inf forbids {int(forbidden.sum())} of {forbidden.size} entries and leaves no assignment{place}"
            ". Every set of k rows needs at least k columns to choose from; allow more entries."
        ) from error


def _fastest_solver(n: int) -> Callable[[np.ndarray], np.ndarray]:
    return (n >= _LAPX_FROM and _lapx_solver()) or _scipy_solver


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
        try:
            rows, columns = lap.lapjvr(costs, return_cost=False)
        except ValueError:  # it refuses costs whose differences overflow, which SciPy takes
            return _scipy_solver(costs)
        if not np.array_equal(rows, np.arange(len(costs))):  # what comes back has changed between releases
            return _scipy_solver(costs)
        return np.asarray(columns, dtype=np.int64)

    return solve
