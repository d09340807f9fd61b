"""The gradient through the fixed point, matrix-free, in plain PyTorch.

With P the plan, G the incoming gradient, Q = P o G / tau, a = P 1 and b = P^T 1 the marginals
actually reached, the gradient with respect to the logits is P o (G / tau - x 1^T - 1 y^T), where

    [ D_a  P   ] [x]   [ Q 1   ]
    [ P^T  D_b ] [y] = [ Q^T 1 ]

Eliminating x leaves the Schur complement S = D_b - P^T D_a^-1 P, symmetric and positive semi-definite with
S 1 = 0. Conjugate gradients solve it with two products with P per step.
"""

import torch
from torch import Tensor

from onebasin.operator.rounds import multiply

MAX_STEPS = 200  # a cap is safe, because every step lowers the error of the result
CURVATURE_FLOOR = 1.0  # in units of eps: below it, a direction cannot be told from the null space


def implicit_gradient(
    plan: Tensor,
    column_sums: Tensor,
    grad: Tensor,
    tau: float,
    read_every: int = 1,
    out: Tensor | None = None,
    max_steps: int = MAX_STEPS,
) -> Tensor:
    """The gradient with respect to the logits, all (n, n) or (batch, n, n); ``grad`` is left as it is.

    Args:
        plan: The plan, in the computing type.
        column_sums: Of the plan, (n,) or (batch, n).
        grad: The incoming gradient, in the computing type or a lower one.
        tau: The temperature of the plan.
        read_every: Steps between two checks of whether all problems are solved; 0 for no check (graph capture).
        out: Where to write the result.
        max_steps: The most steps of conjugate gradients.
    """
    weighted = torch.mul(plan, grad, out=out)
    row_rhs, column_rhs = weighted.sum(-1), weighted.sum(-2)
    row_sums = plan.sum(-1)
    # Scaled to unit size: in float32 the squares of a gradient of 1e-20 are zero, and those of 1e20 infinite.
    size = torch.maximum(row_rhs.abs().amax(-1, keepdim=True), column_rhs.abs().amax(-1, keepdim=True))
    size = size.masked_fill_(size == 0, 1)  # not `where`: it would copy its scalar to the device, and wait
    rhs = (column_rhs - multiply(plan.mT, row_rhs / row_sums)) / size
    floor = 4 * torch.finfo(plan.dtype).eps * (_norm(row_rhs / size) + _norm(column_rhs / size))
    if plan.ndim == 2 and not plan.is_cuda:
        y = _solve_one(plan, row_sums, column_sums, rhs, float(floor), max_steps)
    else:
        y = _solve(plan, row_sums, column_sums, rhs, floor, read_every, max_steps)
    y.mul_(size)
    x = (row_rhs - multiply(plan, y)) / row_sums
    # Subtract before multiplying by the plan: on a hard plan the difference is exactly zero.
    result = torch.sub(grad, x.unsqueeze(-1), out=weighted).sub_(y.unsqueeze(-2)).mul_(plan)
    return result if tau == 1.0 else result.div_(tau)


def _solve(
    plan: Tensor, row_sums: Tensor, column_sums: Tensor, rhs: Tensor, floor: Tensor, read_every: int, max_steps: int
) -> Tensor:
    """Conjugate gradients from zero on S y = rhs, orthogonal to the constants, for each problem of the batch."""
    eps = torch.finfo(plan.dtype).eps
    residual = rhs - rhs.mean(-1, keepdim=True)
    target = torch.maximum(10 * eps * _norm(residual), floor).square_()
    direction = residual
    y = torch.zeros_like(residual)
    residual_sq = _dot(residual, residual)
    running = residual_sq > target
    for step in range(max_steps):
        if read_every and step % read_every == 0 and not running.any():
            break
        image = column_sums * direction - multiply(plan.mT, multiply(plan, direction) / row_sums)
        curvature = _dot(direction, image)
        running = running & (curvature > CURVATURE_FLOOR * eps * _dot(direction, direction))
        length = (residual_sq / curvature).masked_fill_(~running, 0)
        y = torch.addcmul(y, length, direction)
        residual = torch.addcmul(residual, length, image, value=-1)
        residual = residual - residual.mean(-1, keepdim=True)
        last_sq, residual_sq = residual_sq, _dot(residual, residual)
        direction = torch.addcmul(residual, (residual_sq / last_sq).masked_fill_(~running, 0), direction)
        running = running & (residual_sq > target)
    return y


def _solve_one(plan: Tensor, row_sums: Tensor, column_sums: Tensor, rhs: Tensor, floor: float, max_steps: int) -> Tensor:
    """The same for one problem, with scalars on the host: half the calls, which dominate the time at n = 256."""
    eps = torch.finfo(plan.dtype).eps
    residual = rhs - rhs.mean()
    y = torch.zeros_like(residual)
    direction = residual.clone()
    residual_sq = direction_sq = float(torch.dot(residual, residual))
    target = max(100 * eps**2 * residual_sq, floor**2)
    transposed, weights = plan.t(), row_sums.reciprocal()
    for _ in range(max_steps):
        if not residual_sq > target:
            break
        image = torch.mv(plan, direction).mul_(weights)
        image = torch.addmv(column_sums * direction, transposed, image, alpha=-1)
        curvature = float(torch.dot(direction, image))
        if not curvature > CURVATURE_FLOOR * eps * direction_sq:
            break
        y.add_(direction, alpha=residual_sq / curvature)
        residual.sub_(image, alpha=residual_sq / curvature)
        residual.sub_(residual.mean())
        last_sq, residual_sq = residual_sq, float(torch.dot(residual, residual))
        direction.mul_(residual_sq / last_sq).add_(residual)
        # The residual is orthogonal to the old direction, so their squared lengths add.
        direction_sq = residual_sq + (residual_sq / last_sq) ** 2 * direction_sq
    return y


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, keepdim=True)


def _norm(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
