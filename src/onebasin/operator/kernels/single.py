# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Small problems: a program holds a matrix in registers; one launch does all rounds, or a whole gradient.

Potentials are in the unit of the logits, and exponents in base two: a plan is exp2((logits + f + g) * scale)
with scale = log2(e) / tau, and `unscale` is its reciprocal.
"""

import triton
import triton.language as tl

# A column whose sum falls below this has lost entries to underflow; its own maximum then gives its potential.
VANISHED = tl.constexpr(1e-30)
EPS = tl.constexpr(1.1920929e-07)  # of float32, in which all kernels compute


@triton.jit(do_not_specialize=["num_iters", "stop_every"])
def single_rounds(
    logits,
    plan,
    columns,
    rounds,
    n,
    scale,
    unscale,
    num_iters,
    tol,
    stop_every,
    HAS_TOL: tl.constexpr,
    N: tl.constexpr,
):
    """All rounds of one problem; see `run_rounds`. Program i does problem i."""
    problem = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, N)
    within = line < n
    places = problem * n * n + line[:, None] * n + line[None, :]
    inside = within[:, None] & within[None, :]
    x = tl.load(logits + places, mask=inside, other=-float("inf")).to(tl.float32)
    g = _column_potential(x, tl.zeros([N], tl.float32), within, scale, unscale)
    done = 0
    limit = num_iters
    while done < limit:
        exponentials, sums, top = _row_exponentials(x, g, within, scale)
        reached = tl.sum(exponentials / sums[:, None], 0)
        done += 1
        if HAS_TOL:
            error = tl.max(tl.where(within, tl.abs(reached - 1), 0.0), 0)
            if (done % stop_every == 0) & (error <= tol):
                limit = done
        if done < limit:
            if tl.min(tl.where(within, reached, 1.0), 0) < VANISHED:
                f = tl.where(within, -(top + tl.log2(sums) * unscale), 0.0)
                g = _column_potential(x, f, within, scale, unscale)
            else:
                g = tl.where(within, g - tl.log2(reached) * unscale, 0.0)
    exponentials, sums, top = _row_exponentials(x, g, within, scale)
    result = exponentials / sums[:, None]
    tl.store(plan + places, result, mask=inside)
    tl.store(columns + problem * n + line, tl.sum(result, 0), mask=within)
    tl.store(rounds + problem, done.to(tl.int64))


@triton.jit
def _row_exponentials(x, g, within, scale):
    shifted = x + g[None, :]
    top = tl.where(within, tl.max(shifted, 1), 0.0)  # the lines of the padding are all -inf
    exponentials = tl.exp2((shifted - top[:, None]) * scale)
    return exponentials, tl.where(within, tl.sum(exponentials, 1), 1.0), top


@triton.jit
def _column_potential(x, f, within, scale, unscale):
    shifted = x + f[:, None]
    top = tl.where(within, tl.max(shifted, 0), 0.0)
    sums = tl.sum(tl.exp2((shifted - top[None, :]) * scale), 0)
    return tl.where(within, -(top + tl.log2(sums) * unscale), 0.0)


@triton.jit(do_not_specialize=["max_steps"])
def single_gradient(plan, columns, grad, result, n, rate, max_steps, N: tl.constexpr):
    """The gradient of one problem; see `implicit_gradient`. Program i does problem i; rate is 1 / tau."""
    problem = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, N)
    within = line < n
    places = problem * n * n + line[:, None] * n + line[None, :]
    inside = within[:, None] & within[None, :]
    p = tl.load(plan + places, mask=inside, other=0.0)
    weighted = p * tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    row_rhs, column_rhs = tl.sum(weighted, 1), tl.sum(weighted, 0)
    weights = tl.where(within, 1.0 / tl.sum(p, 1), 0.0)
    b = tl.load(columns + problem * n + line, mask=within, other=0.0)
    size = tl.maximum(tl.max(tl.abs(row_rhs), 0), tl.max(tl.abs(column_rhs), 0))
    size = tl.where(size > 0, size, 1.0)
    residual = (column_rhs - tl.sum(p * (row_rhs * weights)[:, None], 0)) / size
    residual = tl.where(within, residual - tl.sum(residual, 0) / n, 0.0)
    row_norm = tl.sqrt(tl.sum((row_rhs / size) * (row_rhs / size), 0))
    column_norm = tl.sqrt(tl.sum((column_rhs / size) * (column_rhs / size), 0))
    power = tl.sum(residual * residual, 0)
    target = tl.maximum(10 * EPS * tl.sqrt(power), 4 * EPS * (row_norm + column_norm))
    target = target * target
    direction = residual
    y = tl.zeros([N], tl.float32)
    step = 0
    while (step < max_steps) & (power > target):
        image = tl.sum(p * direction[None, :], 1) * weights
        image = b * direction - tl.sum(p * image[:, None], 0)
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
    g = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + places, p * (g - x[:, None] - y[None, :]) * rate, mask=inside)
