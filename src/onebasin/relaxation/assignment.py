"""Scores to a hard permutation: exact maximum assignment, with the duals that prove it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from onebasin.relaxation.device_assignment import solve_on_device
from onebasin.relaxation.host_assignment import find_prices, solve_on_host

THREADS_FROM = 64  # units; a smaller problem is solved before a thread has started
_ROUNDING = 1e-13  # the gap of an assignment that is the best one up to roundings
DEVICE_FROM = 2**19  # entries of a batch; fewer are solved on the CPU before the launches on the device are over
_LARGEST_GAP = 1e-9  # of a solution from the device that is taken without another look
_WIDEST_START = 1e3  # times the best scores of rows: prices further apart would cost digits of the scores


@dataclass(frozen=True)
class AssignmentInfo:
    """The proof that an assignment is the best one: no assignment can be worth more than `bound`.

    For every row i and column j, row_duals[i] + column_duals[j] >= scores[i, j], and where there are more columns than rows
    no column has a dual below zero. So the sum of all duals bounds the sum of the scores of any assignment. All numbers are
    float64, for each problem of the batch, on the device of the scores.

    Attributes:
        columns: (*batch, m), the assignment.
        row_duals: (*batch, m).
        column_duals: (*batch, n), the prices of the columns.
        value: (*batch), the sum of the scores that were chosen.
        bound: (*batch), the sum of the duals.
        gap: (*batch), bound minus value as a share of the sum of the absolute scores that were chosen. It is zero for
            integers, and some roundings for other numbers.
        solved: (*batch), False where the answer was known from the start, so that nothing had to be solved.

    >>> import torch
    >>> import onebasin as ob
    >>> scores = torch.rand(5, 5)
    >>> columns, info = ob.assign(scores, return_info=True)
    >>> bool((info.row_duals[:, None] + info.column_duals >= scores - 1e-9).all()), bool(info.gap < 1e-9)
    (True, True)
    """

    columns: Tensor
    row_duals: Tensor
    column_duals: Tensor
    value: Tensor
    bound: Tensor
    gap: Tensor
    solved: Tensor


class Start(NamedTuple):
    """Prices of columns to begin with, (*batch, n), and an assignment that may still be the best, (*batch, m)."""

    prices: Tensor
    columns: Tensor | None = None


class Solution(NamedTuple):
    """Columns of the rows, (*batch, m); prices of the columns, (*batch, n), if known; which problems were solved."""

    columns: Tensor
    prices: Tensor | None
    solved: Tensor


@overload
def assign(scores: Tensor, start: AssignmentInfo | Tensor | None = None, return_info: Literal[False] = False) -> Tensor: ...
@overload
def assign(
    scores: Tensor, start: AssignmentInfo | Tensor | None = None, *, return_info: Literal[True]
) -> tuple[Tensor, AssignmentInfo]: ...
def assign(
    scores: Tensor, start: AssignmentInfo | Tensor | None = None, return_info: bool = False
) -> Tensor | tuple[Tensor, AssignmentInfo]:
    """Choose one column for each row, all different, so that the sum of their scores is the largest possible.

    Where the best columns of the rows are all different they are the answer, and nothing is solved. Otherwise each problem
    is solved exactly: on the CPU in float64 by `lapx` where it is installed, which is faster, or by SciPy, the problems
    of a batch on several threads; large problems and batches on a CUDA device are solved there, all at once.

    Args:
        scores: (*batch, m, n) real numbers, m <= n. -inf forbids an entry. Ties are broken in an unspecified way, the same
            in every call.
        start: prices of the columns, (*batch, n), or the info of an earlier call with similar scores. The solution begins
            with the best columns of the rows under scores - prices; nothing is solved where they are all different, or
            where the earlier assignment still meets the bound of its duals. Any prices give an exact answer. With more
            columns than rows they are used for nothing else.
        return_info: return the duals as well. On the CPU it takes about as long to find them as to solve the problem.

    Returns:
        The column of each row, (*batch, m), int64, on the device of the scores; with `return_info` a pair of them and an
        `AssignmentInfo`.

    Raises:
        ValueError: There are more rows than columns, a score is NaN or +inf, -inf leaves no assignment, or the start has
            another shape.
        TypeError: The scores or the start are not a tensor of real numbers.

    >>> import torch
    >>> import onebasin as ob
    >>> scores = torch.tensor([[3.0, 2.0], [3.0, 0.0]])
    >>> columns, info = ob.assign(scores, return_info=True)
    >>> columns, info.value.item(), info.bound.item()
    (tensor([1, 0]), 5.0, 5.0)
    >>> ob.assign(scores, start=info, return_info=True)[1].solved.item()
    False
    """
    _check(scores)
    solution = assign_all([scores], [_check_start(start, scores)], wants_prices=return_info)[0]
    if not return_info:
        return solution.columns
    assert solution.prices is not None
    return solution.columns, _certify(scores.detach(), solution.columns, solution.prices, solution.solved)


def assign_all(
    matrices: Sequence[Tensor], starts: Sequence[Start | None] | None = None, wants_prices: bool = False
) -> list[Solution]:
    """`assign` for tensors of several shapes; on the CPU their problems are solved together, on PyTorch's number of threads.

    Args:
        matrices: scores, each (*batch, m, n).
        starts: what to begin with, or None.
        wants_prices: find them where they do not come for nothing, which they do on a GPU.
    """
    for scores in matrices:
        _check(scores)
    batches = [
        _Batch(scores.detach(), start, wants_prices)
        for scores, start in zip(matrices, starts or [None] * len(matrices), strict=True)
    ]
    tasks = [task for batch in batches for task in batch.tasks()]
    tasks.sort(key=lambda task: -task[0])  # the longest first, so that no thread ends with one of them alone
    num_threads = min(len(tasks), torch.get_num_threads())
    if num_threads > 1 and tasks[0][0] >= THREADS_FROM:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda task: task[1](), tasks))
    else:
        for _, solve in tasks:
            solve()
    return [batch.solution() for batch in batches]


class _Batch:
    """The problems of one tensor, (batch, m, n), and what is known of their solutions.

    Whatever remains to be solved on the CPU are its tasks.
    """

    def __init__(self, scores: Tensor, start: Start | None, wants_prices: bool):
        self.shape, self.wants_prices = scores.shape, wants_prices
        m, n = self.shape[-2:]
        self.scores = scores.reshape(math.prod(self.shape[:-2]), m, n)
        self.start = None if start is None else _make_usable(start.prices.reshape(len(self.scores), n), self.scores)
        self.reduced = self.scores if self.start is None else self.scores - self.start[:, None, :]
        self.prices = torch.zeros(len(self.scores), n, dtype=torch.float64, device=scores.device)
        self._take_best()
        if start is not None and start.columns is not None and scores.numel():
            self._keep(start.columns.to(scores.device).reshape(len(self.scores), m))
        self.left = self.solved.nonzero()[:, 0]
        if scores.is_cuda and m == n and len(self.left) * n * n >= DEVICE_FROM:
            self._solve_on_device()
        if len(self.left):  # what is solved on the CPU is collected there
            self.columns, self.prices = self.columns.cpu(), self.prices.cpu()

    def _take_best(self) -> None:
        """The best column of each row; where they differ they are the answer."""
        if not self.scores.numel():
            self.columns = torch.empty(self.scores.shape[:-1], dtype=torch.int64, device=self.scores.device)
            self.solved = torch.zeros(len(self.scores), dtype=torch.bool)
            return
        top, self.columns = self.reduced.max(-1)  # NaN and +inf are maxima, so that they are found here
        ordered = self.columns.sort(-1).values
        is_known = (ordered[:, 1:] > ordered[:, :-1]).all(-1) & top.isfinite().all(-1)
        if self.start is not None:
            is_known &= self._set_prices(self.columns, self.start)
        self.solved = ~is_known.cpu()

    def _keep(self, columns: Tensor) -> None:
        """An earlier assignment where it meets the bound of the prices that came with it."""
        assert self.start is not None
        prices = self.prices
        self._set_prices(columns, self.start)
        reduced = self.reduced if self.shape[-1] == self.shape[-2] else None
        gap = _certify(self.scores, columns, self.prices, self.solved, reduced).gap
        is_kept = (gap <= (_ROUNDING if self.scores.is_floating_point() else 0)) & self.solved.to(gap.device)
        self.columns = torch.where(is_kept[:, None], columns, self.columns)
        self.prices = torch.where(is_kept[:, None], self.prices, prices)
        self.solved &= ~is_kept.cpu()

    def _set_prices(self, columns: Tensor, start: Tensor) -> Tensor:
        """Take the prices of the start; whether they can prove that these columns are the answer.

        A column without a row must have no price: this is so after a shift if no other column costs less.
        """
        if self.shape[-1] == self.shape[-2]:
            self.prices = start.clone()
            return torch.ones_like(start[:, 0], dtype=torch.bool)
        is_used = torch.zeros_like(start, dtype=torch.bool).scatter_(1, columns, True)
        unused = start.masked_fill(is_used, -math.inf).amax(-1, keepdim=True)
        self.prices = (start - unused).clamp_min(0)
        return (start.masked_fill(~is_used, math.inf) >= unused).all(-1)

    def _solve_on_device(self) -> None:
        left = self.left.to(self.scores.device)
        scores = self.scores[left]
        columns, prices, is_complete = solve_on_device(scores, None if self.start is None else self.start[left])
        gap = _certify(scores, columns.clamp_min(0), prices, is_complete).gap
        is_proven = is_complete & (gap <= _LARGEST_GAP)
        self.columns[left[is_proven]] = columns[is_proven]
        self.prices[left[is_proven]] = prices[is_proven]
        self.left = self.left[~is_proven.cpu()]

    def tasks(self) -> list[tuple[int, Callable[[], None]]]:
        """What remains: the size of each problem, and a function that solves it."""
        if not len(self.left):
            return []
        problems = self.reduced if self.shape[-1] == self.shape[-2] else self.scores
        if len(self.left) < len(problems):
            problems = problems[self.left.to(problems.device)]
        problems = problems.to("cpu", torch.float64)

        def make(place: int, number: int) -> Callable[[], None]:
            return lambda: self._solve(number, problems[place])

        return [(self.shape[-1], make(place, number)) for place, number in enumerate(self.left.tolist())]

    def _solve(self, number: int, problem: Tensor) -> None:
        where = "" if len(self.shape) == 2 else f" (problem {_unravel(number, self.shape[:-2])} of the batch)"
        columns = torch.from_numpy(solve_on_host(problem.numpy(), where))
        self.columns[number] = columns
        if self.wants_prices:
            scores = self.scores[number].to("cpu", torch.float64)
            start = torch.zeros_like(scores[0])
            if scores.shape[0] == scores.shape[1]:
                start = scores.amax(0) if self.start is None else self.prices[number]
            self.prices[number] = find_prices(scores, columns, start, 1e-14 if self.scores.is_floating_point() else 0.0)

    def solution(self) -> Solution:
        """In the shape and on the device of the scores."""
        batch, device = self.shape[:-2], self.scores.device
        is_known = self.wants_prices or not len(self.left)
        prices = self.prices.to(device).reshape(*batch, self.shape[-1]) if is_known else None
        columns = self.columns.to(device).reshape(self.shape[:-1])
        return Solution(columns, prices, self.solved.to(device).reshape(batch))


def _check(scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.is_complex() or scores.dtype == torch.bool:
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"assign takes a tensor of real scores, but got {kind}.")
    if scores.ndim < 2 or scores.shape[-2] > scores.shape[-1]:
        raise ValueError(
            f"assign takes scores of shape (*batch, m, n) with m <= n, a column for each row, but got {tuple(scores.shape)}"
            ". Transpose the scores to choose a row for each column."
        )


def _check_start(start: AssignmentInfo | Tensor | None, scores: Tensor) -> Start | None:
    if start is None:
        return None
    prices, columns = (start.column_duals, start.columns) if isinstance(start, AssignmentInfo) else (start, None)
    if not isinstance(prices, Tensor) or prices.is_complex() or prices.dtype == torch.bool:
        kind = prices.dtype if isinstance(prices, Tensor) else type(prices).__name__
        raise TypeError(f"start takes a tensor of prices or the info of an earlier call, but got {kind}.")
    expected = (*scores.shape[:-2], scores.shape[-1])
    if prices.shape != expected or (columns is not None and columns.shape != scores.shape[:-1]):
        raise ValueError(f"start must have a price for each column, {expected}, but got {tuple(prices.shape)}.")
    return Start(prices.detach().to(scores.device), columns)


def _make_usable(prices: Tensor, scores: Tensor) -> Tensor:
    """Prices in float64, whole ones for integers; zeros for a problem where they would cost digits of the scores."""
    prices = prices.double()
    if not scores.is_floating_point():
        prices = prices.round()
    if not scores.numel():
        return prices
    largest = scores.amax(2).double().abs().amax(1, keepdim=True)
    prices = prices - prices.amax(1, keepdim=True)
    return torch.where((prices >= -_WIDEST_START * largest).all(1, keepdim=True), prices, 0.0)


def _certify(
    scores: Tensor, columns: Tensor, prices: Tensor, solved: Tensor, reduced: Tensor | None = None
) -> AssignmentInfo:
    """The duals of an assignment, with those of the rows from these prices; `reduced` are the scores minus the prices."""
    reduced = scores - prices.unsqueeze(-2) if reduced is None else reduced
    row_duals = reduced.amax(-1) if scores.numel() else prices.new_zeros(columns.shape)
    chosen = scores.gather(-1, columns.unsqueeze(-1)).squeeze(-1).double()
    value, bound = chosen.sum(-1), row_duals.sum(-1) + prices.sum(-1)
    excess = (bound - value).clamp_min(0)
    gap = torch.where(excess == 0, 0.0, excess / chosen.abs().sum(-1))
    return AssignmentInfo(columns, row_duals, prices, value, bound, gap, solved)


def _unravel(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    places = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        places.append(place)
    return tuple(reversed(places))
