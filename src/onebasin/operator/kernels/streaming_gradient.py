# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The gradient of problems that do not fit into registers: each solver step streams the plan, in one launch for all steps.

It has the same structure as `streaming_rounds`: cooperating programs, phases with a `barrier` between them, and a workspace
of vectors of N floats. In each pair of vectors below, one holds the state before a step of the conjugate gradients and the
other the state after it.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.barrier import barrier, load_l2, sum_partials
from onebasin.operator.kernels.resident import EPS

ROW_RHS = tl.constexpr(0)
WEIGHTS = tl.constexpr(1)  # reciprocals of the row sums
COLUMN_RHS = tl.constexpr(2)
IMAGE = tl.constexpr(3)  # the Schur complement times the direction
Y = tl.constexpr(4)  # a pair
RESIDUAL = tl.constexpr(6)  # a pair
DIRECTION = tl.constexpr(8)  # a pair
SCALARS = tl.constexpr(10)  # size, target, and the pair of squared residuals
PARTIALS = tl.constexpr(11)  # two vectors per rank


@triton.jit
def start_gradient(plan, grad, work, rank, num_ranks, n, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the right-hand sides of this rank's rows, and what these rows contribute to those of the columns."""
    column = tl.arange(0, N)
    column_mask = column < n
    whole = tl.zeros([N], tl.float32)
    eliminated = tl.zeros([N], tl.float32)
    for start in range(rank * ROWS, n, num_ranks * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & column_mask[None, :]
        offsets = row[:, None] * n + column[None, :]
        p = tl.load(plan + offsets, mask=mask, other=0.0)
        weighted = p * tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        row_rhs = tl.sum(weighted, 1)
        weights = tl.where(row < n, 1.0 / tl.sum(p, 1), 0.0)
        tl.store(work + ROW_RHS * N + row, row_rhs, mask=row < n)
        tl.store(work + WEIGHTS * N + row, weights, mask=row < n)
        whole += tl.sum(weighted, 0)
        eliminated += tl.sum(p * (row_rhs * weights)[:, None], 0)
    tl.store(work + (PARTIALS + rank) * N + column, whole, mask=column_mask)
    tl.store(work + (PARTIALS + num_ranks + rank) * N + column, eliminated, mask=column_mask)


@triton.jit
def reduce_start(work, rank, num_ranks, n, N: tl.constexpr, BLOCK: tl.constexpr):
    """Phase: the right-hand side of the Schur complement."""
    for start in range(rank * BLOCK, n, num_ranks * BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < n
        whole = sum_partials(work + PARTIALS * N, column, column_mask, num_ranks, N, BLOCK)
        eliminated = sum_partials(work + (PARTIALS + num_ranks) * N, column, column_mask, num_ranks, N, BLOCK)
        tl.store(work + COLUMN_RHS * N + column, whole, mask=column_mask)
        tl.store(work + IMAGE * N + column, whole - eliminated, mask=column_mask)


@triton.jit
def update_solver(work, rank, n, step, max_steps, N: tl.constexpr):
    """The vector part of a solver step, computed by every rank alike: whether to go on, and the next direction."""
    column = tl.arange(0, N)
    column_mask = column < n
    image = load_l2(work + IMAGE * N + column, column_mask)
    scalars = work + SCALARS * N
    if step == 0:
        row_rhs = load_l2(work + ROW_RHS * N + column, column_mask)
        column_rhs = load_l2(work + COLUMN_RHS * N + column, column_mask)
        size = tl.maximum(tl.max(tl.abs(row_rhs), 0), tl.max(tl.abs(column_rhs), 0))
        size = tl.where(size > 0, size, 1.0)
        row_rhs, column_rhs, residual = row_rhs / size, column_rhs / size, image / size
        residual = tl.where(column_mask, residual - tl.sum(residual, 0) / n, 0.0)
        direction = residual
        y = tl.zeros([N], tl.float32)
        residual_sq = tl.sum(residual * residual, 0)
        norms = tl.sqrt(tl.sum(row_rhs * row_rhs, 0)) + tl.sqrt(tl.sum(column_rhs * column_rhs, 0))
        target = tl.maximum(10 * EPS * tl.sqrt(residual_sq), 4 * EPS * norms)
        target = target * target
        tl.store(scalars, size, mask=rank == 0)
        tl.store(scalars + 1, target, mask=rank == 0)
    else:
        before = (step + 1) % 2
        target = load_l2(scalars + 1, True)
        last_sq = load_l2(scalars + 2 + before, True)
        y = load_l2(work + (Y + before) * N + column, column_mask)
        residual = load_l2(work + (RESIDUAL + before) * N + column, column_mask)
        direction = load_l2(work + (DIRECTION + before) * N + column, column_mask)
        curvature = tl.sum(direction * image, 0)
        is_curved = curvature > EPS * tl.sum(direction * direction, 0)
        length = tl.where(is_curved, last_sq / curvature, 0.0)
        y += length * direction
        residual -= length * image
        residual = tl.where(column_mask, residual - tl.sum(residual, 0) / n, 0.0)
        residual_sq = tl.where(is_curved, tl.sum(residual * residual, 0), 0.0)
        direction = residual + residual_sq / last_sq * direction
    after = step % 2
    mask = column_mask & (rank == 0)
    tl.store(work + (Y + after) * N + column, y, mask=mask)
    tl.store(work + (RESIDUAL + after) * N + column, residual, mask=mask)
    tl.store(work + (DIRECTION + after) * N + column, direction, mask=mask)
    tl.store(scalars + 2 + after, residual_sq, mask=rank == 0)
    return (residual_sq > target) & (step < max_steps), direction


@triton.jit
def multiply_rows(plan, work, direction, rank, num_ranks, n, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: what this rank's rows contribute to P^T D_a^-1 P times the direction, in one pass over them."""
    column = tl.arange(0, N)
    column_mask = column < n
    image = tl.zeros([N], tl.float32)
    for start in range(rank * ROWS, n, num_ranks * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & column_mask[None, :]
        p = tl.load(plan + row[:, None] * n + column[None, :], mask=mask, other=0.0)
        weights = load_l2(work + WEIGHTS * N + row, row < n)
        image += tl.sum(p * (tl.sum(p * direction[None, :], 1) * weights)[:, None], 0)
    tl.store(work + (PARTIALS + rank) * N + column, image, mask=column_mask)


@triton.jit
def reduce_image(column_sums, work, rank, num_ranks, n, step, N: tl.constexpr, BLOCK: tl.constexpr):
    """Phase: the Schur complement times the direction."""
    for start in range(rank * BLOCK, n, num_ranks * BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < n
        direction = load_l2(work + (DIRECTION + step % 2) * N + column, column_mask)
        b = tl.load(column_sums + column, mask=column_mask, other=0.0)
        total = sum_partials(work + PARTIALS * N, column, column_mask, num_ranks, N, BLOCK)
        tl.store(work + IMAGE * N + column, b * direction - total, mask=column_mask)


@triton.jit
def finish_gradient(plan, grad, result, work, rank, num_ranks, n, rate, step, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the gradient itself, for this rank's rows."""
    column = tl.arange(0, N)
    column_mask = column < n
    size = load_l2(work + SCALARS * N, True)
    y = load_l2(work + (Y + step % 2) * N + column, column_mask) * size
    for start in range(rank * ROWS, n, num_ranks * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & column_mask[None, :]
        offsets = row[:, None] * n + column[None, :]
        p = tl.load(plan + offsets, mask=mask, other=0.0)
        row_rhs = load_l2(work + ROW_RHS * N + row, row < n)
        x = (row_rhs - tl.sum(p * y[None, :], 1)) * load_l2(work + WEIGHTS * N + row, row < n)
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(result + offsets, p * (g - x[:, None] - y[None, :]) * rate, mask=mask)


@triton.jit(do_not_specialize=["batch", "max_steps", "num_ranks", "num_slots"])
def streaming_gradient(
    plan, column_sums, grad, result, workspace, counters, batch, n, rate, max_steps, num_ranks, num_slots,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of all problems; see `implicit_gradient`. `rate` is 1 / tau."""
    slot, rank = tl.program_id(0) // num_ranks, tl.program_id(0) % num_ranks
    work = workspace + slot.to(tl.int64) * (PARTIALS + 2 * num_ranks) * N
    counter = counters + slot
    arrivals = 0
    for problem in range(slot, batch, num_slots):
        base = tl.cast(problem, tl.int64) * n * n
        c = column_sums + tl.cast(problem, tl.int64) * n
        start_gradient(plan + base, grad + base, work, rank, num_ranks, n, N, ROWS)
        arrivals = barrier(counter, arrivals, num_ranks)
        reduce_start(work, rank, num_ranks, n, N, BLOCK)
        arrivals = barrier(counter, arrivals, num_ranks)
        step = 0
        limit = max_steps + 1
        while step < limit:
            running, direction = update_solver(work, rank, n, step, max_steps, N)
            if running:
                multiply_rows(plan + base, work, direction, rank, num_ranks, n, N, ROWS)
                arrivals = barrier(counter, arrivals, num_ranks)
                reduce_image(c, work, rank, num_ranks, n, step, N, BLOCK)
                arrivals = barrier(counter, arrivals, num_ranks)
                step += 1
            else:
                limit = step
        arrivals = barrier(counter, arrivals, num_ranks)
        finish_gradient(plan + base, grad + base, result + base, work, rank, num_ranks, n, rate, step, N, ROWS)
        arrivals = barrier(counter, arrivals, num_ranks)
