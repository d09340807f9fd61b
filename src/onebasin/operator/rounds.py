"""Sinkhorn rounds in plain PyTorch: the reference, the CPU path, and the fallback where Triton is missing.

One round makes the columns sum to one, then the rows. In the scaling form the plan is diag(u) K diag(v), and
a round is two matrix-vector products. Where u and v leave the range in which K holds every entry that matters, the
same rounds are run in the log domain, and K is rebuilt from the potentials that they reach.
"""

from typing import NamedTuple

import torch
from torch import Tensor

STOP_EVERY = 4  # rounds between two checks of the tolerance: each check waits for the device


class Rounds(NamedTuple):
    """A plan, the column sums it reached (its rows sum to one), and how many rounds made it."""

    plan: Tensor  # (batch, n, n), in the computing type
    column_sums: Tensor  # (batch, n)
    rounds: Tensor  # (batch,), int64


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type the rounds are run in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply(matrix: Tensor, vector: Tensor, out: Tensor | None = None) -> Tensor:
    """Matrix-vector product of one problem, (n, n) and (n,), or of a batch, (batch, n, n) and (batch, n)."""
    if matrix.ndim == 2:
        return torch.mv(matrix, vector, out=out)
    # As a row vector, which is twice as fast on the CPU as the same product with a column vector.
    out = out if out is None else out.unsqueeze(1)
    return torch.bmm(vector.unsqueeze(1), matrix.mT, out=out).squeeze(1)


def run_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None, out: Tensor | None = None) -> Rounds:
    """Run the rounds on (n, n) or (batch, n, n) logits; reads values back to the host every few rounds."""
    running = None if tol is None else torch.ones(logits.shape[:-2], dtype=torch.bool, device=logits.device)
    rounds = torch.full(logits.shape[:-2], num_iters if tol is None else 0, device=logits.device)
    # Shifting a column is free: the first step of the first round normalises columns.
    g = -logits.amax(-2).to(computing_dtype(logits.dtype))
    kernel = _divide(torch.add(logits, g.unsqueeze(-2), out=out), tau).exp_()
    transposed = kernel.mT
    u, v = torch.ones_like(g), torch.ones_like(g)
    sums = multiply(transposed, u)
    done = 0
    while done < num_iters:
        # Entries leave the range early if at all, so without a tolerance the checks become rarer.
        block = min(STOP_EVERY if tol is not None else STOP_EVERY + done, num_iters - done)
        last_u, last_v, last_sums = (u, v.clone(), sums) if tol is None else (u.clone(), v.clone(), sums.clone())
        for _ in range(block):
            torch.reciprocal(sums, out=v)
            multiply(kernel, v, out=u).reciprocal_()
            multiply(transposed, u, out=sums)
        if running is not None and done:  # stopped problems keep the scalings they stopped at
            for new, last in ((u, last_u), (v, last_v), (sums, last_sums)):
                new.copy_(torch.where(running.unsqueeze(-1), new, last))
        if not _within_range(u, v):
            g = g + tau * last_v.log()
            f = _row_potential(logits, g, tau) if done else torch.zeros_like(g)
            new = _log_rounds(logits, f, tau, block)
            g = new if running is None else torch.where(running.unsqueeze(-1), new, g)
            _softmax_rows(logits, g, tau, out=kernel)
            u.fill_(1)
            v.fill_(1)
            multiply(transposed, u, out=sums)
        done += block
        if running is not None and tol is not None:
            rounds += block * running
            running = ~((v * sums - 1).abs().amax(-1) <= tol)
            if not running.any():
                break
    plan = kernel.mul_(u.unsqueeze(-1)).mul_(v.unsqueeze(-2))
    return Rounds(plan, v * sums, rounds)


def run_log_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None) -> Rounds:
    """The same rounds in the log domain alone: slower, but a CUDA graph can capture them, as they read nothing back."""
    dtype = computing_dtype(logits.dtype)
    g = -logits.amax(-2).to(dtype)
    f = torch.zeros_like(g)
    rounds = torch.zeros(logits.shape[:-2], dtype=torch.int64, device=logits.device)
    running = torch.ones_like(rounds, dtype=torch.bool)
    for done in range(num_iters):
        new = _column_potential(logits, f, tau)
        if tol is not None and done and done % STOP_EVERY == 0:
            running = running & ~(((g - new) / tau).expm1().abs().amax(-1) <= tol)
        g = torch.where(running.unsqueeze(-1), new, g)
        f = _row_potential(logits, g, tau)
        rounds += running
    plan = _softmax_rows(logits, g, tau)
    return Rounds(plan, plan.sum(-2), rounds)


def _divide(shifted: Tensor, tau: float) -> Tensor:
    return shifted if tau == 1.0 else shifted.div_(tau)


def _within_range(u: Tensor, v: Tensor) -> bool:
    """Whether every entry that K lost to underflow stays negligible after scaling; false on inf and NaN too."""
    limits = torch.finfo(u.dtype)
    reach = u.amax(-1) * v.amax(-1)
    return bool((reach.amax() if reach.ndim else reach) < limits.eps**2 / limits.tiny)


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
    sums = _divide(shifted.sub_(top), tau).exp_().sum(dim)
    return -(top.squeeze(dim) + tau * sums.log())


def _softmax_rows(logits: Tensor, g: Tensor, tau: float, out: Tensor | None = None) -> Tensor:
    # Shifted by the row's own maximum, not by a stored potential: at 1e30 a sum of three terms has no digits left.
    shifted = torch.add(logits, g.unsqueeze(-2), out=out)
    _divide(shifted.sub_(shifted.amax(-1, keepdim=True)), tau).exp_()
    return shifted.div_(shifted.sum(-1, keepdim=True))
