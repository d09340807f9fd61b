# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Problems of up to 1,024 units: a program keeps a strip of rows in registers, and one launch does all rounds or a gradient.

Up to 128 units the strip is the whole matrix. Larger problems are shared by a team of programs, which tell each other what
they found in their columns, once a round and once a step of the conjugate gradients. All members get the same numbers, so
that all of them decide alike: none waits for one that has left.

Potentials are in the unit of the logits, and exponents in base two: a plan is exp2((logits + f + g) * scale) with
scale = log2(e) / tau, and `unscale` is its reciprocal. Rounds are in the scaling form, diag(u) K diag(v): two products a
number and round. K is exp2 of logits and potentials, its rows summing to one; when u and v come near the ends of float32's
range, they are taken into the potentials and K is made anew.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.mail import exchange

# Scalings up to this leave the entries that K lost to underflow below rounding, in every row and column.
WIDEST = tl.constexpr(4e12)
EPS = tl.constexpr(1.1920929e-07)  # of float32, in which all kernels compute


@triton.jit
def _column_potential(
    x, f, within, scale, unscale, mail, member, team, turn,
    N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """The potential of the columns by their own maxima, exact whatever the range. Takes two turns."""
    shifted = x + f[:, None]
    top = exchange(tl.max(shifted, 0), mail, member, team, turn, True, N, ROWS, TEAM)
    top = tl.where(within, top, 0.0)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    sums = tl.sum(tl.exp2((shifted - pivot[None, :]) * scale), 0)
    sums = exchange(sums, mail, member, team, turn + 1, False, N, ROWS, TEAM)
    return tl.where(within, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit
def _normalise_rows(x, g, below, scale, unscale):
    """The rows of exp2((x + g) * scale) made to sum to one, and their potential; the lines of the padding are zero."""
    shifted = x + g[None, :]
    top = tl.where(below, tl.max(shifted, 1), 0.0)
    exponentials = tl.exp2((shifted - top[:, None]) * scale)
    sums = tl.where(below, tl.sum(exponentials, 1), 1.0)
    return exponentials * (1.0 / sums)[:, None], tl.where(below, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit(do_not_specialize=["batch", "num_iters", "stop_every", "team", "num_teams"])
def strip_rounds(
    logits, plan, columns, rounds, memory, batch, n, scale, unscale, num_iters, tol, stop_every, team, num_teams,
    HAS_TOL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """All rounds of the problems of each team; see `run_rounds`."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    mail = memory + index.to(tl.int64) * 2 * (TEAM + 1) * N
    column, row = tl.arange(0, N), member * ROWS + tl.arange(0, ROWS)
    within, below = column < n, row < n
    inside = below[:, None] & within[None, :]
    places = row[:, None] * n + column[None, :]
    turn = 1
    for problem in range(index, batch, num_teams):
        offset = tl.cast(problem, tl.int64) * n * n
        kernel = tl.zeros([ROWS, N], tl.float32)
        g = tl.zeros([N], tl.float32)
        u = tl.zeros([ROWS], tl.float32)
        v = tl.where(within, 1.0, 0.0)
        reached = tl.zeros([N], tl.float32)
        done = 0
        limit = num_iters
        worn = True
        while done < limit:
            if worn:  # at first, too: with f = 0 the potential of the columns normalises those of the logits themselves
                # Read again rather than kept: the registers are needed for K.
                x = tl.load(logits + offset + places, mask=inside, other=-float("inf")).to(tl.float32)
                g = tl.where(within, g + tl.log2(v) * unscale, 0.0)
                kernel, f = _normalise_rows(x, g, below, scale, unscale)
                f = tl.where(done > 0, f, 0.0)
                g = _column_potential(x, f, within, scale, unscale, mail, member, team, turn, N, ROWS, TEAM)
                turn += 2
                kernel, f = _normalise_rows(x, g, below, scale, unscale)
                v = tl.where(within, 1.0, 0.0)
            u = tl.where(below, 1.0 / tl.sum(kernel * v[None, :], 1), 0.0)
            total = tl.sum(kernel * u[:, None], 0)
            total = exchange(total, mail, member, team, turn, False, N, ROWS, TEAM)
            reached = v * total
            turn += 1
            done += 1
            if HAS_TOL:
                error = tl.max(tl.where(within, tl.abs(reached - 1), 0.0), 0)
                if (done % stop_every == 0) & (error <= tol):
                    limit = done
            if done < limit:
                inverse = 1.0 / total
                worn = tl.max(tl.where(within, tl.maximum(total, inverse), 0.0), 0) > WIDEST
                if not worn:
                    v = tl.where(within, inverse, 0.0)
        tl.store(plan + offset + places, kernel * u[:, None] * v[None, :], mask=inside)
        tl.store(columns + tl.cast(problem, tl.int64) * n + column, reached, mask=within & (member == 0))
        tl.store(rounds + problem, tl.cast(done, tl.int64), mask=member == 0)


@triton.jit(do_not_specialize=["batch", "max_steps", "team", "num_teams"])
def strip_gradient(
    plan, columns, grad, result, memory, batch, n, rate, max_steps, team, num_teams,
    N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """The whole gradient of the problems of each team; see `implicit_gradient`. `rate` is 1 / tau."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    mail = memory + index.to(tl.int64) * 2 * (TEAM + 1) * N
    column, row = tl.arange(0, N), member * ROWS + tl.arange(0, ROWS)
    within, below = column < n, row < n
    inside = below[:, None] & within[None, :]
    places = row[:, None] * n + column[None, :]
    turn = 1
    for problem in range(index, batch, num_teams):
        offset = tl.cast(problem, tl.int64) * n * n
        p = tl.load(plan + offset + places, mask=inside, other=0.0)
        weighted = p * tl.load(grad + offset + places, mask=inside, other=0.0).to(tl.float32)
        row_rhs = tl.sum(weighted, 1)
        weights = tl.where(below, 1.0 / tl.sum(p, 1), 0.0)
        b = tl.load(columns + tl.cast(problem, tl.int64) * n + column, mask=within, other=0.0)
        column_rhs = exchange(tl.sum(weighted, 0), mail, member, team, turn, False, N, ROWS, TEAM)
        eliminated = tl.sum(p * (row_rhs * weights)[:, None], 0)
        eliminated = exchange(eliminated, mail, member, team, turn + 1, False, N, ROWS, TEAM)
        all_rows = tl.sum(tl.where(row[:, None] == column[None, :], row_rhs[:, None], 0.0), 0)
        all_rows = exchange(all_rows, mail, member, team, turn + 2, False, N, ROWS, TEAM)
        turn += 3
        size = tl.max(tl.maximum(tl.abs(all_rows), tl.abs(column_rhs)), 0)
        size = tl.where(size > 0, size, 1.0)
        residual = (column_rhs - eliminated) / size
        residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
        row_norm = tl.sqrt(tl.sum((all_rows / size) * (all_rows / size), 0))
        column_norm = tl.sqrt(tl.sum((column_rhs / size) * (column_rhs / size), 0))
        power = tl.sum(residual * residual, 0)
        target = tl.maximum(10 * EPS * tl.sqrt(power), 4 * EPS * (row_norm + column_norm))
        target = target * target
        direction = residual
        squared = power
        y = tl.zeros([N], tl.float32)
        step = 0
        while (step < max_steps) & (power > target):
            image = tl.sum(p * direction[None, :], 1) * weights
            image = tl.sum(p * image[:, None], 0)
            image = b * direction - exchange(image, mail, member, team, turn, False, N, ROWS, TEAM)
            turn += 1
            curvature = tl.sum(direction * image, 0)
            curved = curvature > EPS * squared
            length = tl.where(curved, power / curvature, 0.0)
            y += length * direction
            residual -= length * image
            residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
            last = power
            power = tl.where(curved, tl.sum(residual * residual, 0), 0.0)
            ratio = power / last
            direction = residual + ratio * direction
            squared = power + ratio * ratio * squared  # the residual is orthogonal to the old direction
            step += 1
        y = y * size
        x = (row_rhs - tl.sum(p * y[None, :], 1)) * weights
        # The gradient is read a second time rather than kept: the registers are needed for the plan.
        g = tl.load(grad + offset + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + offset + places, p * (g - x[:, None] - y[None, :]) * rate, mask=inside)
