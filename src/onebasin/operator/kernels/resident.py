# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Kernels for up to 1,024 units: every program keeps its tile of the matrix in registers for the whole launch.

Up to 128 units the tile is the whole matrix. A larger problem is shared by several cooperating programs, each with a tile of
ROWS rows and numbered by its rank. They combine their column sums with an `all_reduce`, once per round and once per step of
the conjugate gradients. All ranks get the same numbers and so take the same branches: none waits for one that has left.

Potentials are in the unit of the logits, and exponents in base two: a plan is exp2((logits + f + g) * scale) with
scale = log2(e) / tau, and `unscale` is its reciprocal. Rounds are in the scaling form, diag(u) K diag(v), which takes two
multiplications per entry and round. K is exp2 of logits and potentials, and its rows sum to one. When u and v come near the
ends of float32's range, they are moved into the potentials and K is rebuilt.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.all_reduce import all_reduce

# Up to this scaling, the entries that K lost to underflow stay below rounding in every row and column.
MAX_SCALING = tl.constexpr(4e12)
EPS = tl.constexpr(1.1920929e-07)  # of float32, in which all kernels compute


@triton.jit
def _locate_tile(messages, n, num_ranks, N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """The slot and rank of this program, the messages of its slot, its rows and columns, their offsets and their mask."""
    slot, rank = tl.program_id(0) // num_ranks, tl.program_id(0) % num_ranks
    row, column = rank * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    messages += slot.to(tl.int64) * 2 * (RANKS + 1) * N
    return slot, rank, messages, row, column, row[:, None] * n + column[None, :], (row < n)[:, None] & (column < n)[None, :]


@triton.jit
def _column_potential(
    x, f, column_mask, scale, unscale, messages, rank, num_ranks, epoch,
    N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The potential of the columns, exact for any range because it starts from their maxima. Takes two epochs."""
    shifted = x + f[:, None]
    top = all_reduce(tl.max(shifted, 0), messages, rank, num_ranks, epoch, True, N, ROWS, RANKS)
    top = tl.where(column_mask, top, 0.0)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    sums = tl.sum(tl.exp2((shifted - pivot[None, :]) * scale), 0)
    sums = all_reduce(sums, messages, rank, num_ranks, epoch + 1, False, N, ROWS, RANKS)
    return tl.where(column_mask, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit
def _normalise_rows(x, g, row_mask, scale, unscale):
    """exp2((x + g) * scale) with rows that sum to one, and their potential; rows of the padding are zero."""
    shifted = x + g[None, :]
    top = tl.where(row_mask, tl.max(shifted, 1), 0.0)
    exponentials = tl.exp2((shifted - top[:, None]) * scale)
    sums = tl.where(row_mask, tl.sum(exponentials, 1), 1.0)
    return exponentials * (1.0 / sums)[:, None], tl.where(row_mask, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit(do_not_specialize=["batch", "num_iters", "stop_every", "num_ranks", "num_slots"])
def resident_rounds(
    logits, plan, column_sums, rounds, messages, batch, n, scale, unscale, num_iters, tol, stop_every, num_ranks, num_slots,
    HAS_TOL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """All rounds of all problems; see `run_rounds`. Every slot solves one problem after the other."""
    slot, rank, messages, row, column, offsets, mask = _locate_tile(messages, n, num_ranks, N, ROWS, RANKS)
    row_mask, column_mask = row < n, column < n
    epoch = 1
    for problem in range(slot, batch, num_slots):
        base = tl.cast(problem, tl.int64) * n * n
        kernel = tl.zeros([ROWS, N], tl.float32)
        g = tl.zeros([N], tl.float32)
        u = tl.zeros([ROWS], tl.float32)
        v = tl.where(column_mask, 1.0, 0.0)
        reached = tl.zeros([N], tl.float32)
        done = 0
        limit = num_iters
        rebuild = True
        while done < limit:
            if rebuild:  # in the first round, f = 0: the column potential then normalises the columns of the logits
                # Loaded again instead of kept: the registers are needed for K.
                x = tl.load(logits + base + offsets, mask=mask, other=-float("inf")).to(tl.float32)
                g = tl.where(column_mask, g + tl.log2(v) * unscale, 0.0)
                kernel, f = _normalise_rows(x, g, row_mask, scale, unscale)
                f = tl.where(done > 0, f, 0.0)
                g = _column_potential(x, f, column_mask, scale, unscale, messages, rank, num_ranks, epoch, N, ROWS, RANKS)
                epoch += 2
                kernel, f = _normalise_rows(x, g, row_mask, scale, unscale)
                v = tl.where(column_mask, 1.0, 0.0)
            u = tl.where(row_mask, 1.0 / tl.sum(kernel * v[None, :], 1), 0.0)
            total = tl.sum(kernel * u[:, None], 0)
            total = all_reduce(total, messages, rank, num_ranks, epoch, False, N, ROWS, RANKS)
            reached = v * total
            epoch += 1
            done += 1
            if HAS_TOL:
                error = tl.max(tl.where(column_mask, tl.abs(reached - 1), 0.0), 0)
                if (done % stop_every == 0) & (error <= tol):
                    limit = done
            if done < limit:
                inverse = 1.0 / total
                rebuild = tl.max(tl.where(column_mask, tl.maximum(total, inverse), 0.0), 0) > MAX_SCALING
                if not rebuild:
                    v = tl.where(column_mask, inverse, 0.0)
        tl.store(plan + base + offsets, kernel * u[:, None] * v[None, :], mask=mask)
        tl.store(column_sums + tl.cast(problem, tl.int64) * n + column, reached, mask=column_mask & (rank == 0))
        tl.store(rounds + problem, tl.cast(done, tl.int64), mask=rank == 0)


@triton.jit
def _solve(
    p, weights, b, residual, floor, column_mask, n, max_steps, messages, rank, num_ranks, epoch,
    N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Conjugate gradients on the Schur complement, see `adjoint`: the solution y, and the next epoch."""
    residual_sq = tl.sum(residual * residual, 0)
    target = tl.maximum(10 * EPS * tl.sqrt(residual_sq), floor)
    target = target * target
    direction = residual
    direction_sq = residual_sq
    y = tl.zeros([N], tl.float32)
    step = 0
    while (step < max_steps) & (residual_sq > target):
        image = tl.sum(p * direction[None, :], 1) * weights
        image = tl.sum(p * image[:, None], 0)
        image = b * direction - all_reduce(image, messages, rank, num_ranks, epoch, False, N, ROWS, RANKS)
        epoch += 1
        curvature = tl.sum(direction * image, 0)
        is_curved = curvature > EPS * direction_sq
        length = tl.where(is_curved, residual_sq / curvature, 0.0)
        y += length * direction
        residual -= length * image
        residual = tl.where(column_mask, residual - tl.sum(residual, 0) / n, 0.0)
        last_sq = residual_sq
        residual_sq = tl.where(is_curved, tl.sum(residual * residual, 0), 0.0)
        ratio = residual_sq / last_sq
        direction = residual + ratio * direction
        direction_sq = residual_sq + ratio * ratio * direction_sq  # the residual is orthogonal to the old direction
        step += 1
    return y, epoch


@triton.jit(do_not_specialize=["batch", "max_steps", "num_ranks", "num_slots"])
def resident_gradient(
    plan, column_sums, grad, result, messages, batch, n, rate, max_steps, num_ranks, num_slots,
    N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The gradients of all problems; see `implicit_gradient`. `rate` is 1 / tau."""
    slot, rank, messages, row, column, offsets, mask = _locate_tile(messages, n, num_ranks, N, ROWS, RANKS)
    row_mask, column_mask = row < n, column < n
    epoch = 1
    for problem in range(slot, batch, num_slots):
        base = tl.cast(problem, tl.int64) * n * n
        p = tl.load(plan + base + offsets, mask=mask, other=0.0)
        weighted = p * tl.load(grad + base + offsets, mask=mask, other=0.0).to(tl.float32)
        row_rhs = tl.sum(weighted, 1)
        weights = tl.where(row_mask, 1.0 / tl.sum(p, 1), 0.0)
        b = tl.load(column_sums + tl.cast(problem, tl.int64) * n + column, mask=column_mask, other=0.0)
        column_rhs = all_reduce(tl.sum(weighted, 0), messages, rank, num_ranks, epoch, False, N, ROWS, RANKS)
        eliminated = tl.sum(p * (row_rhs * weights)[:, None], 0)
        eliminated = all_reduce(eliminated, messages, rank, num_ranks, epoch + 1, False, N, ROWS, RANKS)
        all_rows = tl.sum(tl.where(row[:, None] == column[None, :], row_rhs[:, None], 0.0), 0)
        all_rows = all_reduce(all_rows, messages, rank, num_ranks, epoch + 2, False, N, ROWS, RANKS)
        size = tl.max(tl.maximum(tl.abs(all_rows), tl.abs(column_rhs)), 0)
        size = tl.where(size > 0, size, 1.0)
        residual = (column_rhs - eliminated) / size
        residual = tl.where(column_mask, residual - tl.sum(residual, 0) / n, 0.0)
        row_norm = tl.sqrt(tl.sum((all_rows / size) * (all_rows / size), 0))
        column_norm = tl.sqrt(tl.sum((column_rhs / size) * (column_rhs / size), 0))
        y, epoch = _solve(
            p, weights, b, residual, 4 * EPS * (row_norm + column_norm), column_mask, n, max_steps,
            messages, rank, num_ranks, epoch + 3, N, ROWS, RANKS,
        )  # fmt: skip
        y = y * size
        x = (row_rhs - tl.sum(p * y[None, :], 1)) * weights
        # The gradient is loaded a second time instead of kept: the registers are needed for the plan.
        g = tl.load(grad + base + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(result + base + offsets, p * (g - x[:, None] - y[None, :]) * rate, mask=mask)
