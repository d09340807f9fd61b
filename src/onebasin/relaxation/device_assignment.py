"""Exact assignment by vector operations, for a batch of problems on a GPU.

The method is primal and dual. Prices of the columns and duals of the rows bound all scores from above, and a row is matched
only with a column where the bound is met. One phase finds the shortest paths, in terms of what is missing to the bound, from
the rows without a column to all columns, by the rounds of Bellman and Ford. Lowering each price by the distance of its
column makes the bound tight along all of these paths. They form trees, one for each free row, and trees have no vertex in
common: so every tree that reaches a free column gives its row a column, all at the same time. Most of the free rows find
one in each phase.
"""

import torch
from torch import Tensor

from onebasin.operator.launch import can_compile, launch_paths

MAX_PHASES = 100  # 5 to 60 are needed in practice; scores of rank one need half as many as there are rows


def solve_on_device(scores: Tensor, prices: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Assign all rows of (batch, n, n) problems.

    Args:
        scores: finite, or -inf to forbid an entry.
        prices: (batch, n), float64: prices of columns to begin with. They are used where more rows have a best column of
            their own than under the highest score of each column.

    Returns:
        The columns of the rows and the prices, (batch, n), and for each problem whether all rows have a column: an entry
        that is forbidden, or too many phases, leave some without.
    """
    prices, row_duals, columns, rows = _choose_start(scores, prices)
    reachable = torch.ones(len(scores), 1, dtype=torch.bool, device=scores.device)
    for _ in range(MAX_PHASES):
        is_free = (columns < 0) & reachable
        if not is_free.any():
            break
        reach = torch.where(is_free, 0.0, torch.inf).to(torch.float64)
        distances, parents = _find_paths(scores, row_duals, prices, rows, reach)
        reachable &= distances.isfinite().all(1, keepdim=True) | ~is_free.any(1, keepdim=True)
        moves = is_free.any(1, keepdim=True) & reachable
        distances = torch.where(moves, distances, 0.0)
        prices = prices - distances
        row_duals = row_duals + torch.where(columns < 0, 0.0, distances.gather(1, columns.clamp_min(0)))
        columns, rows = _augment(columns, torch.where(moves, rows, 0), rows, parents)
    return columns, prices - prices.amax(1, keepdim=True), (columns >= 0).all(1)


def _choose_start(scores: Tensor, prices: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prices, the duals of the rows under them, and a first matching: each column takes a row whose best it is."""
    highest = scores.amax(1).double()
    start = _match_best(scores, torch.where(highest.isfinite(), highest, 0.0))
    if prices is None:
        return start
    given = _match_best(scores, prices)
    takes_given = ((given[2] < 0).sum(1) <= (start[2] < 0).sum(1))[:, None]
    mixed = [torch.where(takes_given, ours, theirs) for ours, theirs in zip(given, start, strict=True)]
    return mixed[0], mixed[1], mixed[2], mixed[3]


def _match_best(scores: Tensor, prices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = scores.shape[-1]
    row_duals, best = (scores - prices[:, None, :]).max(2)
    index = torch.arange(n, device=scores.device).expand_as(best)
    rows = torch.full_like(best, n).scatter_reduce_(1, best, index, "amin")
    columns = torch.where(rows.gather(1, best) == index, best, -1)
    return prices, row_duals, columns, torch.where(rows == n, -1, rows)


def _find_paths(scores: Tensor, row_duals: Tensor, prices: Tensor, rows: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    if scores.is_cuda and can_compile(scores.device):
        return launch_paths(scores, row_duals, prices, rows, reach)
    return find_paths(scores, row_duals, prices, rows, reach)


def find_paths(scores: Tensor, row_duals: Tensor, prices: Tensor, rows: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """`launch_paths` in plain PyTorch."""
    n = scores.shape[-1]
    missing = (row_duals[:, :, None] + prices[:, None, :] - scores).clamp_min(0)
    index = torch.arange(n, device=scores.device)
    turned = (index[:, None] - index).remainder(n)  # columns begin to look for a row at different ones, see the kernel
    distances, parents = torch.full_like(prices, torch.inf), torch.zeros_like(rows)
    while True:
        lengths = missing + reach[:, :, None]
        shortest = lengths.amin(1)
        chosen = (torch.where(lengths == shortest[:, None, :], turned, n).amin(1) + index).remainder(n)
        is_shorter = shortest < distances
        if not is_shorter.any():
            return distances, parents
        # Parents change only where a path becomes shorter: so they never form a cycle, where entries are tied either.
        distances, parents = torch.where(is_shorter, shortest, distances), torch.where(is_shorter, chosen, parents)
        padded = torch.cat([reach, reach[:, :1]], 1)
        reach = padded.scatter(1, torch.where(rows < 0, n, rows), distances)[:, :n]


def _augment(columns: Tensor, occupied: Tensor, rows: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Change the matching along one path of each tree, to its first free column; `occupied` is negative where one is free.

    A column on such a path takes the row before it. Pointer doubling finds the roots and marks the paths.
    """
    n = columns.shape[1]
    index = torch.arange(n, device=columns.device).expand_as(columns)
    before = columns.gather(1, parents)  # the column before on the path
    above = torch.where(before < 0, index, before)
    root = above
    for _ in range(n.bit_length()):
        root = root.gather(1, root)
    ends = torch.full_like(columns, n)
    ends.scatter_reduce_(1, parents.gather(1, root), torch.where(occupied < 0, index, n), "amin")
    marked = torch.zeros(len(columns), n + 1, dtype=torch.int32, device=columns.device).scatter_(1, ends, 1)[:, :n]
    for _ in range(n.bit_length()):
        marked = marked.scatter_reduce(1, above, marked, "amax")
        above = above.gather(1, above)
    on_path = marked > 0
    columns = torch.cat([columns, columns[:, :1]], 1).scatter(1, torch.where(on_path, parents, n), index)[:, :n]
    return columns, torch.where(on_path, parents, rows)
