# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Rounds of problems that do not fit into registers: each round streams the logits, in one launch for all rounds.

Several cooperating programs share a problem. In one pass over the matrix each program normalises blocks of rows and adds up
their columns; after a `barrier`, each adds up what all of them found in some of the columns. These phases are separate
functions, so that tests can launch them one by one where programs do not run at the same time.

The workspace of a problem is a list of vectors of N floats, indexed by the constants below. `resident` explains `scale`.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.barrier import barrier, load_l2, sum_partials

# A column whose sum falls below this has lost entries to underflow; its potential is then computed from its maximum.
UNDERFLOW = tl.constexpr(1e-30)

F = tl.constexpr(0)  # row potentials
G = tl.constexpr(1)  # column potentials: two vectors, of the current and of the next round
PARTIALS = tl.constexpr(3)  # column sums: one vector per rank


@triton.jit
def _column_potential(
    x, f, column, column_mask, n, scale, unscale, FIRST: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr
):  # fmt: skip
    """The potential of BLOCK columns, exact for any range because it starts from their maxima; with f = 0 if FIRST."""
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, TALL):
        row = start + tl.arange(0, TALL)
        mask = (row < n)[:, None] & column_mask[None, :]
        shifted = tl.load(x + row[:, None] * n + column[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        if not FIRST:
            shifted += load_l2(f + row, row < n)[:, None]
        higher = tl.maximum(top, tl.max(shifted, 0))
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        sums = sums * tl.exp2((top - pivot) * scale) + tl.sum(tl.exp2((shifted - pivot[None, :]) * scale), 0)
        top = higher
    return -(top + tl.log2(sums) * unscale)


@triton.jit
def start_columns(x, work, rank, num_ranks, n, scale, unscale, N: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr):
    """Phase: the first column potentials."""
    for start in range(rank * BLOCK, n, num_ranks * BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = _column_potential(x, work, column, column < n, n, scale, unscale, True, BLOCK, TALL)
        tl.store(work + G * N + column, g, mask=column < n)


@triton.jit
def normalise_rows(x, plan, work, rank, num_ranks, n, scale, unscale, done, write, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: normalise the rows of this rank and add up their columns; store the plan if `write`."""
    column = tl.arange(0, N)
    column_mask = column < n
    g = load_l2(work + (G + done % 2) * N + column, column_mask)
    reached = tl.zeros([N], tl.float32)
    for start in range(rank * ROWS, n, num_ranks * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & column_mask[None, :]
        offsets = row[:, None] * n + column[None, :]
        shifted = tl.load(x + offsets, mask=mask, other=-float("inf")).to(tl.float32) + g[None, :]
        top = tl.where(row < n, tl.max(shifted, 1), 0.0)
        exponentials = tl.exp2((shifted - top[:, None]) * scale)
        sums = tl.where(row < n, tl.sum(exponentials, 1), 1.0)
        result = exponentials * (1.0 / sums)[:, None]
        tl.store(work + F * N + row, -(top + tl.log2(sums) * unscale), mask=row < n)
        tl.store(plan + offsets, result, mask=mask & write)
        reached += tl.sum(result, 0)
    tl.store(work + (PARTIALS + rank) * N + column, reached, mask=column_mask)


@triton.jit
def reduce_columns(
    x, column_sums, work, rank, num_ranks, n, scale, unscale, done,
    N: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Phase: the column sums of the whole matrix, and the next column potentials."""
    for start in range(rank * BLOCK, n, num_ranks * BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < n
        reached = sum_partials(work + PARTIALS * N, column, column_mask, num_ranks, N, BLOCK)
        tl.store(column_sums + column, reached, mask=column_mask)
        g = load_l2(work + (G + done % 2) * N + column, column_mask) - tl.log2(reached) * unscale
        if tl.min(tl.where(column_mask, reached, 1.0), 0) < UNDERFLOW:
            exact = _column_potential(x, work + F * N, column, column_mask, n, scale, unscale, False, BLOCK, TALL)
            g = tl.where(reached < UNDERFLOW, exact, g)
        tl.store(work + (G + (done + 1) % 2) * N + column, g, mask=column_mask)


@triton.jit(do_not_specialize=["batch", "num_iters", "stop_every", "num_ranks", "num_slots"])
def streaming_rounds(
    logits, plan, column_sums, rounds, workspace, counters, batch, n, scale, unscale, num_iters, tol, stop_every,
    num_ranks, num_slots,
    HAS_TOL: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """All rounds of all problems; see `run_rounds`. Every slot solves one problem after the other."""
    slot, rank = tl.program_id(0) // num_ranks, tl.program_id(0) % num_ranks
    work = workspace + slot.to(tl.int64) * (PARTIALS + num_ranks) * N
    counter = counters + slot
    arrivals = 0
    for problem in range(slot, batch, num_slots):
        x = logits + tl.cast(problem, tl.int64) * n * n
        p = plan + tl.cast(problem, tl.int64) * n * n
        c = column_sums + tl.cast(problem, tl.int64) * n
        start_columns(x, work, rank, num_ranks, n, scale, unscale, N, BLOCK, TALL)
        arrivals = barrier(counter, arrivals, num_ranks)
        done = 0
        limit = num_iters
        while done < limit:
            normalise_rows(x, p, work, rank, num_ranks, n, scale, unscale, done, done + 1 == limit, N, ROWS)
            arrivals = barrier(counter, arrivals, num_ranks)
            reduce_columns(x, c, work, rank, num_ranks, n, scale, unscale, done, N, BLOCK, TALL)
            arrivals = barrier(counter, arrivals, num_ranks)
            done += 1
            if HAS_TOL:  # noqa: SIM102, resolved when the kernel is compiled
                if (done % stop_every == 0) & (done < limit):
                    column = tl.arange(0, N)
                    error = tl.abs(load_l2(c + column, column < n) - 1)
                    if tl.max(tl.where(column < n, error, 0.0), 0) <= tol:
                        # The round that reached the tolerance was not stored: run it again, and store it.
                        limit = done
                        normalise_rows(x, p, work, rank, num_ranks, n, scale, unscale, done - 1, True, N, ROWS)
        tl.store(rounds + problem, tl.cast(done, tl.int64), mask=rank == 0)
        arrivals = barrier(counter, arrivals, num_ranks)
