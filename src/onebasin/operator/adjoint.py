"""The gradient through the fixed point, matrix-free, in plain PyTorch.

With P the plan, G the incoming gradient, Q = P o G / tau, a = P 1 and b = P^T 1 the marginals
actually reached, the gradient with respect to the logits is P o (G / tau - x 1^T - 1 y^T), where

    [ D_a  P   ] [x]   [ Q 1   ]
    [ P^T  D_b ] [y] = [ Q^T 1 ]

Eliminating x leaves the Schur complement S = D_b - P^T D_a^-1 P, symmetric and positive semi-definite with
S 1 = 0, which conjugate gradients solve at two products with P a step.
"""

import torch
from torch import Tensor

from onebasin.operator.rounds import multiply

MAX_STEPS = 200  # every step lowers the error of the result, so a cap is safe
CURVATURE_FLOOR = 1.0  # in units of eps: below it, a direction cannot be told from the null space


def implicit_gradient(
    plan: Tensor,
    columns: Tensor,
    grad: Tensor,
    tau: float,
    read_every: int = 1,
    out: Tensor | None = None,
    max_steps: int = MAX_STEPS,
) -> Tensor:
    """The gradient with respect to the logits, all (n, n) or (batch, n, n); ``grad`` is left as it is.

    Args:
        plan: The plan, in the computing type.
        columns: Its column sums, (n,) or (batch, n).
        grad: The incoming gradient, in the computing type or a lower one.
        tau: The temperature of the plan.
        read_every: Steps between the looks at whether all problems are solved; 0 never looks (graph capture).
        out: Where to write the result.
        max_steps: Of conjugate gradients.
    """
    weighted = torch.mul(plan, grad, out=out)
    row_rhs, column_rhs = weighted.sum(-1), weighted.sum(-2)
    rows = plan.sum(-1)
    # At unit size: in float32 the squares of a gradient of 1e-20 are zero, and those of 1e20 infinite.
    size = torch.maximum(row_rhs.abs().amax(-1, keepdim=True), column_rhs.abs().amax(-1, keepdim=True))
    size = size.masked_fill_(size == 0, 1)  # not `where`: it would copy its scalar to the device, and wait
    rhs = (column_rhs - multiply(plan.mT, row_rhs / rows)) / size
    floor = 4 * torch.finfo(plan.dtype).eps * (_norm(row_rhs / size) + _norm(column_rhs / size))
    if plan.ndim == 2 and not plan.is_cuda:
        y = _solve_one(plan, rows, columns, rhs, float(floor), max_steps)
    else:
        y = _solve(plan, rows, columns, rhs, floor, read_every, max_steps)
    y.mul_(size)
    x = (row_rhs - multiply(plan, y)) / rows
    # Subtract before multiplying by the plan: on a hard plan the difference is exactly zero.
    result = torch.sub(grad, x.unsqueeze(-1), out=weighted).sub_(y.unsqueeze(-2)).mul_(plan)
    return result if tau == 1.0 else result.div_(tau)


def _solve(
    plan: Tensor, rows: Tensor, columns: Tensor, rhs: Tensor, floor: Tensor, read_every: int, max_steps: int
) -> Tensor:
    """Conjugate gradients from zero on S y = rhs, off the constants, each problem of the batch by itself."""
    eps = torch.finfo(plan.dtype).eps
    residual = rhs - rhs.mean(-1, keepdim=True)
    target = torch.maximum(10 * eps * _norm(residual), floor).square_()
    direction = residual
    y = torch.zeros_like(residual)
    power = _dot(residual, residual)
    running = power > target
    for step in range(max_steps):
        if read_every and step % read_every == 0 and not running.any():
            break
        image = columns * direction - multiply(plan.mT, multiply(plan, direction) / rows)
        curvature = _dot(direction, image)
        running = running & (curvature > CURVATURE_FLOOR * eps * _dot(direction, direction))
        length = (power / curvature).masked_fill_(~running, 0)
        y = torch.addcmul(y, length, direction)
        residual = torch.addcmul(residual, length, image, value=-1)
        residual = residual - residual.mean(-1, keepdim=True)
        last, power = power, _dot(residual, residual)
        direction = torch.addcmul(residual, (power / last).masked_fill_(~running, 0), direction)
        running = running & (power > target)
    return y


def _solve_one(plan: Tensor, rows: Tensor, columns: Tensor, rhs: Tensor, floor: float, max_steps: int) -> Tensor:
    """The same for one problem, with host scalars: half the calls, and calls are the time at n = 256."""
    eps = torch.finfo(plan.dtype).eps
    residual = rhs - rhs.mean()
    y = torch.zeros_like(residual)
    direction = residual.clone()
    power = length_squared = float(torch.dot(residual, residual))
    target = max(100 * eps**2 * power, floor**2)
    transposed, weights = plan.t(), rows.reciprocal()
    for _ in range(max_steps):
        if not power > target:
            break
        image = torch.mv(plan, direction).mul_(weights)
        image = torch.addmv(columns * direction, transposed, image, alpha=-1)
        curvature = float(torch.dot(direction, image))
        if not curvature > CURVATURE_FLOOR * eps * length_squared:
            break
        y.add_(direction, alpha=power / curvature)
        residual.sub_(image, alpha=power / curvature)
        residual.sub_(residual.mean())
        last, power = power, float(torch.dot(residual, residual))
        direction.mul_(power / last).add_(residual)
        # The residual is orthogonal to the old direction, so their squared lengths add.
        length_squared = power + (power / last) ** 2 * length_squared
    return y


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, keepdim=True)


def _norm(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
