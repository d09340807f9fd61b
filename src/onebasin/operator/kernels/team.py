# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Larger problems: a team of programs shares a matrix, and one launch does all rounds, or all of a gradient.

Each member normalises blocks of rows and adds up their columns in the same pass over the matrix; the members
then add up what all of them found, each for some columns. Between such phases the team waits for its last
member, which is safe because the launch is cooperative: either all programs are on the device, or none is.
The phases are functions of their own, to be run one by one where programs do not run side by side.

The memory of a team is a list of vectors of N floats, named by the constants below.
"""

import triton
import triton.language as tl

from onebasin.operator.kernels.strip import EPS

# A column whose sum falls below this has lost entries to underflow; its own maximum then gives its potential.
VANISHED = tl.constexpr(1e-30)

# Rounds: row potentials, two column potentials (the last and the next), then the partial sums of each member.
F = tl.constexpr(0)
G = tl.constexpr(1)
PARTIAL = tl.constexpr(3)
ROUNDS_VECTORS = 3  # and one for each member

# Gradient: pairs are the state before and after a step of the conjugate gradients.
ROW_RHS = tl.constexpr(0)
WEIGHTS = tl.constexpr(1)
COLUMN_RHS = tl.constexpr(2)
IMAGE = tl.constexpr(3)
Y = tl.constexpr(4)
RESIDUAL = tl.constexpr(6)
DIRECTION = tl.constexpr(8)
SCALARS = tl.constexpr(10)  # size, target, and the power before and after a step
PARTIALS = tl.constexpr(11)
GRADIENT_VECTORS = 11  # and two for each member


@triton.jit
def wait_for_team(counter, arrivals):
    """Go on once the counter says that every member has come this far; what they wrote can then be read."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    tl.debug_barrier()


@triton.jit
def load_shared(pointer, mask):
    """Read what another member may have written: past the cache of this processor."""
    return tl.load(pointer, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def add_partials(partials, column, within, team, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over the members of some columns."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, team, 32):
        member = first + tl.arange(0, 32)
        mask = (member < team)[:, None] & within[None, :]
        total += tl.sum(load_shared(partials + member[:, None] * STRIDE + column[None, :], mask), 0)
    return total


@triton.jit
def column_potential(x, f, column, within, n, scale, unscale, FIRST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The potential of some columns by their own maxima, exact whatever the range; with f = 0 if FIRST."""
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & within[None, :]
        shifted = tl.load(x + row[:, None] * n + column[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        if not FIRST:
            shifted += load_shared(f + row, row < n)[:, None]
        higher = tl.maximum(top, tl.max(shifted, 0))
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        sums = sums * tl.exp2((top - pivot) * scale) + tl.sum(tl.exp2((shifted - pivot[None, :]) * scale), 0)
        top = higher
    return -(top + tl.log2(sums) * unscale)


@triton.jit
def start_columns(x, work, member, team, n, scale, unscale, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the first column potentials."""
    for start in range(member * BLOCK, n, team * BLOCK):
        column = start + tl.arange(0, BLOCK)
        within = column < n
        g = column_potential(x, work, column, within, n, scale, unscale, True, BLOCK, ROWS)
        tl.store(work + G * N + column, g, mask=within)


@triton.jit
def normalise_rows(x, plan, work, member, team, n, scale, unscale, done, write, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the rows of this member, and the sums of their columns; `write` keeps the plan."""
    column = tl.arange(0, N)
    within = column < n
    g = load_shared(work + (G + done % 2) * N + column, within)
    reached = tl.zeros([N], tl.float32)
    for start in range(member * ROWS, n, team * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & within[None, :]
        places = row[:, None] * n + column[None, :]
        shifted = tl.load(x + places, mask=inside, other=-float("inf")).to(tl.float32) + g[None, :]
        top = tl.where(row < n, tl.max(shifted, 1), 0.0)
        exponentials = tl.exp2((shifted - top[:, None]) * scale)
        sums = tl.where(row < n, tl.sum(exponentials, 1), 1.0)
        result = exponentials * (1.0 / sums)[:, None]
        tl.store(work + F * N + row, -(top + tl.log2(sums) * unscale), mask=row < n)
        tl.store(plan + places, result, mask=inside & write)
        reached += tl.sum(result, 0)
    tl.store(work + (PARTIAL + member) * N + column, reached, mask=within)


@triton.jit
def reduce_columns(
    x,
    columns,
    work,
    member,
    team,
    n,
    scale,
    unscale,
    done,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Phase: the column sums of the whole matrix, and the next column potentials."""
    for start in range(member * BLOCK, n, team * BLOCK):
        column = start + tl.arange(0, BLOCK)
        within = column < n
        reached = add_partials(work + PARTIAL * N, column, within, team, N, BLOCK)
        tl.store(columns + column, reached, mask=within)
        g = load_shared(work + (G + done % 2) * N + column, within) - tl.log2(reached) * unscale
        if tl.min(tl.where(within, reached, 1.0), 0) < VANISHED:
            exact = column_potential(x, work + F * N, column, within, n, scale, unscale, False, BLOCK, ROWS)
            g = tl.where(reached < VANISHED, exact, g)
        tl.store(work + (G + (done + 1) % 2) * N + column, g, mask=within)


@triton.jit(do_not_specialize=["batch", "num_iters", "stop_every", "team", "num_teams"])
def team_rounds(
    logits, plan, columns, rounds, memory, counters, batch, n, scale, unscale, num_iters, tol, stop_every,
    team, num_teams,
    HAS_TOL: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """All rounds of the problems of each team; see `run_rounds`."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    work = memory + index.to(tl.int64) * (PARTIAL + team) * N
    counter = counters + index
    arrivals = 0
    for problem in range(index, batch, num_teams):
        x = logits + tl.cast(problem, tl.int64) * n * n
        p = plan + tl.cast(problem, tl.int64) * n * n
        c = columns + tl.cast(problem, tl.int64) * n
        start_columns(x, work, member, team, n, scale, unscale, N, BLOCK, TALL)
        arrivals += team
        wait_for_team(counter, arrivals)
        done = 0
        limit = num_iters
        while done < limit:
            normalise_rows(x, p, work, member, team, n, scale, unscale, done, done + 1 == limit, N, ROWS)
            arrivals += team
            wait_for_team(counter, arrivals)
            reduce_columns(x, c, work, member, team, n, scale, unscale, done, N, BLOCK, TALL)
            arrivals += team
            wait_for_team(counter, arrivals)
            done += 1
            if HAS_TOL:  # noqa: SIM102, resolved when the kernel is compiled
                if (done % stop_every == 0) & (done < limit):
                    column = tl.arange(0, N)
                    error = tl.abs(load_shared(c + column, column < n) - 1)
                    if tl.max(tl.where(column < n, error, 0.0), 0) <= tol:
                        # The round that reached the tolerance was not kept: run it again, and keep it.
                        limit = done
                        normalise_rows(x, p, work, member, team, n, scale, unscale, done - 1, True, N, ROWS)
        tl.store(rounds + problem, tl.cast(done, tl.int64), mask=member == 0)
        arrivals += team
        wait_for_team(counter, arrivals)


@triton.jit
def start_gradient(plan, grad, work, member, team, n, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the right-hand sides of this member's rows, and their share in those of the columns."""
    column = tl.arange(0, N)
    within = column < n
    whole = tl.zeros([N], tl.float32)
    eliminated = tl.zeros([N], tl.float32)
    for start in range(member * ROWS, n, team * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & within[None, :]
        places = row[:, None] * n + column[None, :]
        p = tl.load(plan + places, mask=inside, other=0.0)
        weighted = p * tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        row_rhs = tl.sum(weighted, 1)
        weights = tl.where(row < n, 1.0 / tl.sum(p, 1), 0.0)
        tl.store(work + ROW_RHS * N + row, row_rhs, mask=row < n)
        tl.store(work + WEIGHTS * N + row, weights, mask=row < n)
        whole += tl.sum(weighted, 0)
        eliminated += tl.sum(p * (row_rhs * weights)[:, None], 0)
    tl.store(work + (PARTIALS + member) * N + column, whole, mask=within)
    tl.store(work + (PARTIALS + team + member) * N + column, eliminated, mask=within)


@triton.jit
def reduce_start(work, member, team, n, N: tl.constexpr, BLOCK: tl.constexpr):
    """Phase: the right-hand side of the Schur complement."""
    for start in range(member * BLOCK, n, team * BLOCK):
        column = start + tl.arange(0, BLOCK)
        within = column < n
        whole = add_partials(work + PARTIALS * N, column, within, team, N, BLOCK)
        eliminated = add_partials(work + (PARTIALS + team) * N, column, within, team, N, BLOCK)
        tl.store(work + COLUMN_RHS * N + column, whole, mask=within)
        tl.store(work + IMAGE * N + column, whole - eliminated, mask=within)


@triton.jit
def advance(work, member, n, step, max_steps, N: tl.constexpr):
    """A step of the conjugate gradients on the vectors, by every member alike: whether to go on and where."""
    column = tl.arange(0, N)
    within = column < n
    image = load_shared(work + IMAGE * N + column, within)
    scalars = work + SCALARS * N
    if step == 0:
        row_rhs = load_shared(work + ROW_RHS * N + column, within)
        column_rhs = load_shared(work + COLUMN_RHS * N + column, within)
        size = tl.maximum(tl.max(tl.abs(row_rhs), 0), tl.max(tl.abs(column_rhs), 0))
        size = tl.where(size > 0, size, 1.0)
        row_rhs, column_rhs, residual = row_rhs / size, column_rhs / size, image / size
        residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
        direction = residual
        y = tl.zeros([N], tl.float32)
        power = tl.sum(residual * residual, 0)
        norms = tl.sqrt(tl.sum(row_rhs * row_rhs, 0)) + tl.sqrt(tl.sum(column_rhs * column_rhs, 0))
        target = tl.maximum(10 * EPS * tl.sqrt(power), 4 * EPS * norms)
        target = target * target
        tl.store(scalars, size, mask=member == 0)
        tl.store(scalars + 1, target, mask=member == 0)
    else:
        before = (step + 1) % 2
        target = load_shared(scalars + 1, True)
        last = load_shared(scalars + 2 + before, True)
        y = load_shared(work + (Y + before) * N + column, within)
        residual = load_shared(work + (RESIDUAL + before) * N + column, within)
        direction = load_shared(work + (DIRECTION + before) * N + column, within)
        curvature = tl.sum(direction * image, 0)
        curved = curvature > EPS * tl.sum(direction * direction, 0)
        length = tl.where(curved, last / curvature, 0.0)
        y += length * direction
        residual -= length * image
        residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
        power = tl.where(curved, tl.sum(residual * residual, 0), 0.0)
        direction = residual + power / last * direction
    after = step % 2
    keep = within & (member == 0)
    tl.store(work + (Y + after) * N + column, y, mask=keep)
    tl.store(work + (RESIDUAL + after) * N + column, residual, mask=keep)
    tl.store(work + (DIRECTION + after) * N + column, direction, mask=keep)
    tl.store(scalars + 2 + after, power, mask=member == 0)
    return (power > target) & (step < max_steps), direction


@triton.jit
def multiply_rows(plan, work, direction, member, team, n, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: this member's share in P^T D_a^-1 P times the direction, in one pass over its rows."""
    column = tl.arange(0, N)
    within = column < n
    image = tl.zeros([N], tl.float32)
    for start in range(member * ROWS, n, team * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & within[None, :]
        p = tl.load(plan + row[:, None] * n + column[None, :], mask=inside, other=0.0)
        weights = load_shared(work + WEIGHTS * N + row, row < n)
        image += tl.sum(p * (tl.sum(p * direction[None, :], 1) * weights)[:, None], 0)
    tl.store(work + (PARTIALS + member) * N + column, image, mask=within)


@triton.jit
def reduce_image(columns, work, member, team, n, step, N: tl.constexpr, BLOCK: tl.constexpr):
    """Phase: the Schur complement times the direction."""
    for start in range(member * BLOCK, n, team * BLOCK):
        column = start + tl.arange(0, BLOCK)
        within = column < n
        direction = load_shared(work + (DIRECTION + step % 2) * N + column, within)
        b = tl.load(columns + column, mask=within, other=0.0)
        total = add_partials(work + PARTIALS * N, column, within, team, N, BLOCK)
        tl.store(work + IMAGE * N + column, b * direction - total, mask=within)


@triton.jit
def finish_gradient(plan, grad, result, work, member, team, n, rate, step, N: tl.constexpr, ROWS: tl.constexpr):
    """Phase: the gradient itself, for this member's rows."""
    column = tl.arange(0, N)
    within = column < n
    size = load_shared(work + SCALARS * N, True)
    y = load_shared(work + (Y + step % 2) * N + column, within) * size
    for start in range(member * ROWS, n, team * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & within[None, :]
        places = row[:, None] * n + column[None, :]
        p = tl.load(plan + places, mask=inside, other=0.0)
        row_rhs = load_shared(work + ROW_RHS * N + row, row < n)
        x = (row_rhs - tl.sum(p * y[None, :], 1)) * load_shared(work + WEIGHTS * N + row, row < n)
        g = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + places, p * (g - x[:, None] - y[None, :]) * rate, mask=inside)


@triton.jit(do_not_specialize=["batch", "max_steps", "team", "num_teams"])
def team_gradient(
    plan, columns, grad, result, memory, counters, batch, n, rate, max_steps, team, num_teams,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The whole gradient of the problems of each team; see `implicit_gradient`."""
    index, member = tl.program_id(0) // team, tl.program_id(0) % team
    work = memory + index.to(tl.int64) * (PARTIALS + 2 * team) * N
    counter = counters + index
    arrivals = 0
    for problem in range(index, batch, num_teams):
        offset = tl.cast(problem, tl.int64) * n * n
        c = columns + tl.cast(problem, tl.int64) * n
        start_gradient(plan + offset, grad + offset, work, member, team, n, N, ROWS)
        arrivals += team
        wait_for_team(counter, arrivals)
        reduce_start(work, member, team, n, N, BLOCK)
        arrivals += team
        wait_for_team(counter, arrivals)
        step = 0
        limit = max_steps + 1
        while step < limit:
            running, direction = advance(work, member, n, step, max_steps, N)
            if running:
                multiply_rows(plan + offset, work, direction, member, team, n, N, ROWS)
                arrivals += team
                wait_for_team(counter, arrivals)
                reduce_image(c, work, member, team, n, step, N, BLOCK)
                arrivals += team
                wait_for_team(counter, arrivals)
                step += 1
            else:
                limit = step
        arrivals += team
        wait_for_team(counter, arrivals)
        finish_gradient(plan + offset, grad + offset, result + offset, work, member, team, n, rate, step, N, ROWS)
        arrivals += team
        wait_for_team(counter, arrivals)
