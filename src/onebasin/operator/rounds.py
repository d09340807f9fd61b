"""Sinkhorn rounds in plain PyTorch: the reference, the CPU path, and the way out where Triton is missing.

One round makes the columns sum to one, then the rows. In the scaling form the plan is diag(u) K diag(v), and a
round is two matrix-vector products; where u and v leave the range in which K holds every entry that matters, the
same rounds are run in the log domain and K is built anew around the potentials they end at.
"""

from typing import NamedTuple

import torch
from torch import Tensor

STOP_EVERY = 4  # rounds between looks at the range and the tolerance: each look is a wait for the device


class Rounds(NamedTuple):
    """A plan, the column sums it reached (its rows sum to one), and how many rounds made it."""

    plan: Tensor  # (batch, n, n), in the computing type
    columns: Tensor  # (batch, n)
    rounds: Tensor  # (batch,), int64


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type the rounds are run in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply(matrix: Tensor, vector: Tensor) -> Tensor:
    """Batched matrix-vector product, (batch, n, n) and (batch, n)."""
    if matrix.shape[0] == 1:
        return torch.mv(matrix[0], vector[0]).unsqueeze(0)
    # As a row vector: on the CPU twice as fast as the same product with a column vector.
    return torch.bmm(vector.unsqueeze(1), matrix.mT).squeeze(1)


def run_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> Rounds:
    """Run the rounds on (batch, n, n) logits; needs to read values back to the host every few rounds."""
    batch, n, _ = logits.shape
    rounds = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    dtype = computing_dtype(logits.dtype)
    # Shifting a column is free: the first step of the first round normalises columns.
    g = -logits.amax(-2).to(dtype)
    kernel = torch.add(logits, g.unsqueeze(-2)).div_(tau).exp_()
    ones = torch.ones(batch, n, dtype=dtype, device=logits.device)
    u = v = ones
    sums = multiply(kernel.mT, u)
    running = torch.ones_like(rounds, dtype=torch.bool)
    done = 0
    while done < num_iters:
        block = min(STOP_EVERY, num_iters - done)
        last_u, last_v, last_sums = u, v, sums
        for _ in range(block):
            v = sums.reciprocal()
            u = multiply(kernel, v).reciprocal_()
            sums = multiply(kernel.mT, u)
        if tol is not None and done:  # stopped problems keep the scalings they stopped at
            keep = running.unsqueeze(-1)
            u, v = torch.where(keep, u, last_u), torch.where(keep, v, last_v)
            sums = torch.where(keep, sums, last_sums)
        if not _within_range(u, v):
            f = _row_potential(logits, g + tau * last_v.log(), tau) if done else torch.zeros_like(g)
            moved = _log_rounds(logits, f, tau, block)
            g = torch.where(running.unsqueeze(-1), moved, g + tau * last_v.log())
            kernel = _softmax_rows(logits, g, tau, out=kernel)
            u = v = ones
            sums = multiply(kernel.mT, u)
        rounds += block * running
        done += block
        if tol is not None:
            running = ~((v * sums - 1).abs().amax(-1) <= tol)
            if not running.any():
                break
    plan = kernel.mul_(u.unsqueeze(-1)).mul_(v.unsqueeze(-2))
    return Rounds(plan, v * sums, rounds)


def run_log_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> Rounds:
    """The same rounds in the log domain alone: slower, but nothing is read back, so a CUDA graph can hold it."""
    dtype = computing_dtype(logits.dtype)
    f = torch.zeros(logits.shape[:2], dtype=dtype, device=logits.device)
    g = -logits.amax(-2).to(dtype)
    rounds = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    running = torch.ones_like(rounds, dtype=torch.bool)
    for done in range(num_iters):
        sums_left = _column_potential(logits, f, tau)
        if tol is not None and done and done % STOP_EVERY == 0:
            running = running & ~(((g - sums_left) / tau).expm1().abs().amax(-1) <= tol)
        g = torch.where(running.unsqueeze(-1), sums_left, g)
        f = _row_potential(logits, g, tau)
        rounds += running
    plan = _softmax_rows(logits, g, tau)
    return Rounds(plan, plan.sum(-2), rounds)


def _within_range(u: Tensor, v: Tensor) -> bool:
    """Whether no entry that K lost to underflow could matter after scaling; false on inf and NaN too."""
    limits = torch.finfo(u.dtype)
    return bool((u.amax(-1) * v.amax(-1) < limits.eps**2 / limits.tiny).all())


def _log_rounds(logits: Tensor, f: Tensor, tau: float, num_iters: int) -> Tensor:
    g = f
    for _ in range(num_iters):
        g = _column_potential(logits, f, tau)
        f = _row_potential(logits, g, tau)
    return g


def _row_potential(logits: Tensor, g: Tensor, tau: float) -> Tensor:
    return _potential(torch.add(logits, g.unsqueeze(-2)), tau, -1)


def _column_potential(logits: Tensor, f: Tensor, tau: float) -> Tensor:
    return _potential(torch.add(logits, f.unsqueeze(-1)), tau, -2)


def _potential(shifted: Tensor, tau: float, dim: int) -> Tensor:
    # Potentials are kept in the unit of the logits, so that only differences are ever divided by tau.
    top = shifted.amax(dim, keepdim=True)
    sums = shifted.sub_(top).div_(tau).exp_().sum(dim)
    return -(top.squeeze(dim) + tau * sums.log())


def _softmax_rows(logits: Tensor, g: Tensor, tau: float, out: Tensor | None = None) -> Tensor:
    # Rows by their own maximum, not by a stored potential: at logits of 1e30 a sum of three terms has no digits left.
    shifted = torch.add(logits, g.unsqueeze(-2), out=out)
    shifted.sub_(shifted.amax(-1, keepdim=True)).div_(tau)
    return torch.softmax(shifted, -1, out=out) if out is not None else shifted.softmax(-1)
