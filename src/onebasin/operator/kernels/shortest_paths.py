# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Shortest alternating paths from the free rows of an assignment to all columns, in one launch for all rounds.

These are the rounds of Bellman and Ford: in a round every column takes the shortest way over a row, from the distances that
the columns of these rows had in the round before. Cooperating programs share the columns of a problem, with one `barrier`
per round. A row is read again only if its distance has changed. Distances are float64, whatever the scores are.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.barrier import barrier, load_l2


@triton.jit
def relax_columns(
    scores, row_duals, prices, rows, reach, distances, parents, rank, num_ranks, n, done,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A round for the columns of this rank; whether one of them was improved.

    `reach` holds the distances of the rows, of the last three rounds: that of the current one is written while programs
    still read the two before it. Where several rows are equally good, neighbouring columns take different ones: paths from
    different rows can then be used at the same time.
    """
    now, last, following = reach + done % 3 * n, reach + (done + 2) % 3 * n, reach + (done + 1) % 3 * n
    num_tiles = tl.cdiv(n, ROWS)
    changed = 0
    for start in range(rank * BLOCK, n, num_ranks * BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < n
        price = tl.load(prices + column, mask=column_mask, other=0.0)
        best = tl.full([ROWS, BLOCK], float("inf"), tl.float64)
        origin = tl.zeros([ROWS, BLOCK], tl.int32)
        for step in range(num_tiles):
            row = (start // ROWS + step) % num_tiles * ROWS + tl.arange(0, ROWS)
            row_mask = row < n
            length = load_l2(now + row, row_mask)
            is_new = row_mask & ((done == 0) | (length < load_l2(last + row, row_mask)))
            mask = is_new[:, None] & column_mask[None, :]
            score = tl.load(scores + row[:, None] * n + column[None, :], mask=mask, other=0).to(tl.float64)
            dual = tl.load(row_duals + row, mask=row_mask, other=0.0)
            candidate = length[:, None] + tl.maximum(dual[:, None] + price[None, :] - score, 0.0)
            is_better = mask & (candidate < best)
            best = tl.where(is_better, candidate, best)
            origin = tl.where(is_better, row[:, None], origin)
        shortest = tl.min(best, 0)
        turned = (tl.arange(0, ROWS)[:, None] + ROWS - (column % ROWS)[None, :]) % ROWS
        turned = tl.where(best == shortest[None, :], turned, ROWS)
        chosen = tl.sum(tl.where(turned == tl.min(turned, 0)[None, :], origin, 0), 0)
        before = tl.load(distances + column, mask=column_mask, other=0.0)
        is_shorter = (shortest < before) & column_mask
        after = tl.where(is_shorter, shortest, before)
        matched = tl.load(rows + column, mask=column_mask, other=-1)
        tl.store(distances + column, after, mask=is_shorter)
        tl.store(parents + column, chosen.to(tl.int64), mask=is_shorter)
        tl.store(following + matched, after, mask=column_mask & (matched >= 0))
        changed = tl.maximum(changed, tl.max(is_shorter.to(tl.int32), 0))
    return changed


@triton.jit(do_not_specialize=["batch", "num_ranks", "num_slots"])
def shortest_paths(
    scores, row_duals, prices, rows, reach, distances, parents, last_changes, counters, batch, n, num_ranks, num_slots,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rounds of all problems, until nothing changes. Every slot solves one problem after the other."""
    slot, rank = tl.program_id(0) // num_ranks, tl.program_id(0) % num_ranks
    counter = counters + slot
    arrivals = 0
    for problem in range(slot, batch, num_slots):
        vector = tl.cast(problem, tl.int64) * n
        last_change = last_changes + problem
        done = 0
        limit = 1
        while done < limit:
            changed = relax_columns(
                scores + vector * n, row_duals + vector, prices + vector, rows + vector, reach + 3 * vector,
                distances + vector, parents + vector, rank, num_ranks, n, done, ROWS, BLOCK,
            )  # fmt: skip
            done += 1
            if changed > 0:
                tl.atomic_max(last_change, done, sem="relaxed", scope="gpu")
            arrivals = barrier(counter, arrivals, num_ranks)
            # A program that is already one round ahead may have written its number: then this one goes on as well.
            limit = tl.atomic_max(last_change, 0, sem="relaxed", scope="gpu") + 1
