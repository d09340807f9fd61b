"""Scores to a hard permutation: exact maximum assignment."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_THREADS_FROM = 64  # units; a smaller problem is solved before a thread has started

Place = tuple[int, ...]
"""Where in a batch a problem stands."""


def assign(scores: Tensor) -> Tensor:
    """Choose one column for each row, all different, so that the sum of their scores is the largest possible.

    Where the best columns of the rows are all different they are the answer, and nothing is solved. Otherwise
    each problem is solved exactly, in float64 on the CPU, by `lapx` where it is installed, which is faster, or by SciPy;
    the problems of a batch on several threads.

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
    return assign_all([scores])[0]


def assign_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`assign` for tensors of several shapes; their problems are solved together, on as many threads as PyTorch has."""
    for scores in matrices:
        _check(scores)
    found = [_take_best(scores.detach()) for scores in matrices]
    tasks: list[tuple[Tensor, Place, np.ndarray]] = []
    results = []
    for scores, (best, is_solved) in zip(matrices, found, strict=True):
        results.append(best if is_solved.all() else best.cpu())
        if not is_solved.all():
            problems = scores.detach()[(~is_solved).to(scores.device)].to("cpu", torch.float64).numpy()
            places = [tuple(place) for place in (~is_solved).nonzero().tolist()]
            tasks += [(results[-1], place, problem) for place, problem in zip(places, problems, strict=True)]
    tasks.sort(key=lambda task: -len(task[2]))  # the longest first, so that no thread ends with one of them alone

    def solve(task: tuple[Tensor, Place, np.ndarray]) -> None:
        result, place, problem = task
        result[place] = torch.from_numpy(_solve(problem, place))

    num_threads = min(len(tasks), torch.get_num_threads())
    if num_threads > 1 and len(tasks[0][2]) >= _THREADS_FROM:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(solve, tasks))
    else:
        for task in tasks:
            solve(task)
    return [result.to(scores.device) for result, scores in zip(results, matrices, strict=True)]


def _check(scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.is_complex() or scores.dtype == torch.bool:
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"assign takes a tensor of real scores, but got {kind}.")
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(
            f"assign takes scores of shape (*batch, n, n), but got {tuple(scores.shape)}. "
            "Pad a rectangular problem with zeros to a square one."
        )


def _take_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best column of each row, and for each problem whether those columns are the answer (on the CPU)."""
    n = scores.shape[-1]
    if scores.numel() == 0:
        best = torch.empty(scores.shape[:-1], dtype=torch.int64, device=scores.device)
        return best, torch.ones(scores.shape[:-2], dtype=torch.bool)
    top, best = scores.max(-1)  # NaN and +inf are maxima, so that they are found here
    different = (best.sort(-1).values == torch.arange(n, device=scores.device)).all(-1)
    return best, (different & top.isfinite().all(-1)).cpu()


def _solve(scores: np.ndarray, place: Place) -> np.ndarray:
    where = f" (problem {place} of the batch)" if place else ""
    if np.isfinite(scores).all():
        return (_lapx_solver() or _scipy_solver)(-scores)
    for name, bad in (("NaN", np.isnan(scores)), ("+inf", np.isposinf(scores))):
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"assign takes scores that are finite, or -inf to forbid an entry, but {int(bad.sum())} of "
                f"{bad.size} are {name}, the first at {first}{where}."
            )
    return _solve_forbidden(scores, np.isneginf(scores), where)


def _solve_forbidden(scores: np.ndarray, forbidden: np.ndarray, where: str) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment

    try:
        return linear_sum_assignment(scores, maximize=True)[1].astype(np.int64)
    except ValueError as error:
        raise ValueError(
            f"-inf forbids {int(forbidden.sum())} of {forbidden.size} entries and leaves no assignment{where}"
            ". Every set of k rows needs at least k columns to choose from; allow more entries."
        ) from error


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
