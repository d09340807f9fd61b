# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Problems of up to 512 units: a program keeps a strip of rows in registers, and one launch does all rounds or a gradient.

Up to 128 units the strip is the whole matrix. Larger problems are shared by a team of programs, which tell each other what
they found in their columns, once a round and once a step of the conjugate gradients. Every member then adds up the same
numbers in the same order, so that all of them decide alike: none waits for one that has left.

Potentials are in the unit of the logits, and exponents in base two: a plan is exp2((logits + f + g) * scale)
with scale = log2(e) / tau, and `unscale` is its reciprocal.
"""

import triton
import triton.language as tl

# A column whose sum falls below this has lost entries to underflow; its own maximum then gives its potential.
VANISHED = tl.constexpr(1e-30)
EPS = tl.constexpr(1.1920929e-07)  # of float32, in which all kernels compute


@triton.jit
def wait_for_team(counter, arrivals):
    """Go on once the counter says that every member has come this far; what they wrote can then be read."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    tl.debug_barrier()


@triton.jit
def collect(vector, absent, mail, counter, member, team, turn, N: tl.constexpr, TEAM: tl.constexpr):
    """What every member has as this vector, (TEAM, N); `absent` for those that fill TEAM up to a power of two.

    Turns use the two halves of the mail by turns: a member that is one turn ahead leaves alone what others still read.
    """
    if TEAM == 1:
        every = vector[None, :]
    else:
        column, other = tl.arange(0, N), tl.arange(0, TEAM)
        half = mail + turn % 2 * (TEAM + 1) * N
        tl.store(half + member * N + column, vector)
        wait_for_team(counter, (turn + 1) * team)
        present = (other < team)[:, None] & (column < N)[None, :]
        places = half + other[:, None] * N + column[None, :]
        every = tl.load(places, mask=present, other=absent, cache_modifier=".cg")
    return every


@triton.jit
def _row_exponentials(x, g, inside, scale):
    shifted = x + g[None, :]
    top = tl.where(inside, tl.max(shifted, 1), 0.0)  # the lines of the padding are all -inf
    exponentials = tl.exp2((shifted - top[:, None]) * scale)
    return exponentials, tl.where(inside, tl.sum(exponentials, 1), 1.0), top


@triton.jit
def _column_potential(
    x, f, within, scale, unscale, mail, counter, member, team, turn, N: tl.constexpr, TEAM: tl.constexpr
):  # fmt: skip
    """The potential of the columns by their own maxima, exact whatever the range. Takes two turns."""
    shifted = x + f[:, None]
    most = collect(tl.max(shifted, 0), -float("inf"), mail, counter, member, team, turn, N, TEAM)
    top = tl.where(within, tl.max(most, 0), 0.0)
    pivot = tl.where(top == -float("inf"), 0.0, top)
    sums = tl.sum(tl.exp2((shifted - pivot[None, :]) * scale), 0)
    sums = tl.sum(collect(sums, 0.0, mail, counter, member, team, turn + 1, N, TEAM), 0)
    return tl.where(within, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit(do_not_specialize=["batch", "num_iters", "stop_every", "team", "num_teams"])
def strip_rounds(
    logits, plan, columns, rounds, memory, counters, batch, n, scale, unscale, num_iters, tol, stop_every, team, num_teams,
    HAS_TOL: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """All rounds of the problems of each team; see `run_rounds`."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    mail = memory + index.to(tl.int64) * 2 * (TEAM + 1) * N
    counter = counters + index
    column, row = tl.arange(0, N), member * ROWS + tl.arange(0, ROWS)
    within, below = column < n, row < n
    inside = below[:, None] & within[None, :]
    places = row[:, None] * n + column[None, :]
    turn = 0
    for problem in range(index, batch, num_teams):
        offset = tl.cast(problem, tl.int64) * n * n
        x = tl.load(logits + offset + places, mask=inside, other=-float("inf")).to(tl.float32)
        f = tl.zeros([ROWS], tl.float32)
        g = _column_potential(x, f, within, scale, unscale, mail, counter, member, team, turn, N, TEAM)
        turn += 2
        reached = tl.zeros([N], tl.float32)
        done = 0
        limit = num_iters
        while done < limit:
            exponentials, sums, top = _row_exponentials(x, g, below, scale)
            share = tl.sum(exponentials / sums[:, None], 0)
            reached = tl.sum(collect(share, 0.0, mail, counter, member, team, turn, N, TEAM), 0)
            turn += 1
            done += 1
            if HAS_TOL:
                error = tl.max(tl.where(within, tl.abs(reached - 1), 0.0), 0)
                if (done % stop_every == 0) & (error <= tol):
                    limit = done
            if done < limit:
                if tl.min(tl.where(within, reached, 1.0), 0) < VANISHED:
                    f = tl.where(below, -(top + tl.log2(sums) * unscale), 0.0)
                    g = _column_potential(x, f, within, scale, unscale, mail, counter, member, team, turn, N, TEAM)
                    turn += 2
                else:
                    g = tl.where(within, g - tl.log2(reached) * unscale, 0.0)
        exponentials, sums, top = _row_exponentials(x, g, below, scale)
        tl.store(plan + offset + places, exponentials / sums[:, None], mask=inside)
        tl.store(columns + tl.cast(problem, tl.int64) * n + column, reached, mask=within & (member == 0))
        tl.store(rounds + problem, tl.cast(done, tl.int64), mask=member == 0)


@triton.jit(do_not_specialize=["batch", "max_steps", "team", "num_teams"])
def strip_gradient(
    plan, columns, grad, result, memory, counters, batch, n, rate, max_steps, team, num_teams,
    N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr,
):  # fmt: skip
    """The whole gradient of the problems of each team; see `implicit_gradient`. `rate` is 1 / tau."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    mail = memory + index.to(tl.int64) * 2 * (TEAM + 1) * N
    counter = counters + index
    column, row = tl.arange(0, N), member * ROWS + tl.arange(0, ROWS)
    within, below = column < n, row < n
    inside = below[:, None] & within[None, :]
    places = row[:, None] * n + column[None, :]
    turn = 0
    for problem in range(index, batch, num_teams):
        offset = tl.cast(problem, tl.int64) * n * n
        p = tl.load(plan + offset + places, mask=inside, other=0.0)
        weighted = p * tl.load(grad + offset + places, mask=inside, other=0.0).to(tl.float32)
        row_rhs = tl.sum(weighted, 1)
        weights = tl.where(below, 1.0 / tl.sum(p, 1), 0.0)
        b = tl.load(columns + tl.cast(problem, tl.int64) * n + column, mask=within, other=0.0)
        if TEAM == 1:
            all_rows = row_rhs
            column_rhs = tl.sum(weighted, 0)
        else:  # the right-hand sides of all rows stand behind the vectors of the members
            behind = mail + (turn % 2 * (TEAM + 1) + TEAM) * N
            tl.store(behind + row, row_rhs, mask=below)
            column_rhs = tl.sum(collect(tl.sum(weighted, 0), 0.0, mail, counter, member, team, turn, N, TEAM), 0)
            all_rows = tl.load(behind + column, mask=within, other=0.0, cache_modifier=".cg")
        eliminated = tl.sum(p * (row_rhs * weights)[:, None], 0)
        eliminated = tl.sum(collect(eliminated, 0.0, mail, counter, member, team, turn + 1, N, TEAM), 0)
        turn += 2
        size = tl.maximum(tl.max(tl.abs(all_rows), 0), tl.max(tl.abs(column_rhs), 0))
        size = tl.where(size > 0, size, 1.0)
        residual = (column_rhs - eliminated) / size
        residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
        row_norm = tl.sqrt(tl.sum((all_rows / size) * (all_rows / size), 0))
        column_norm = tl.sqrt(tl.sum((column_rhs / size) * (column_rhs / size), 0))
        power = tl.sum(residual * residual, 0)
        target = tl.maximum(10 * EPS * tl.sqrt(power), 4 * EPS * (row_norm + column_norm))
        target = target * target
        direction = residual
        y = tl.zeros([N], tl.float32)
        step = 0
        while (step < max_steps) & (power > target):
            image = tl.sum(p * direction[None, :], 1) * weights
            image = tl.sum(p * image[:, None], 0)
            image = b * direction - tl.sum(collect(image, 0.0, mail, counter, member, team, turn, N, TEAM), 0)
            turn += 1
            curvature = tl.sum(direction * image, 0)
            curved = curvature > EPS * tl.sum(direction * direction, 0)
            length = tl.where(curved, power / curvature, 0.0)
            y += length * direction
            residual -= length * image
            residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
            last = power
            power = tl.where(curved, tl.sum(residual * residual, 0), 0.0)
            direction = residual + power / last * direction
            step += 1
        y = y * size
        x = (row_rhs - tl.sum(p * y[None, :], 1)) * weights
        # The gradient is read a second time rather than kept: the registers are needed for the plan.
        g = tl.load(grad + offset + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + offset + places, p * (g - x[:, None] - y[None, :]) * rate, mask=inside)
