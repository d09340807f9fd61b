"""The rounds as ordinary differentiable operations: exact for those that were run, and the tests' oracle."""

import torch
from torch import Tensor

from onebasin.operator.rounds import STOP_EVERY, Rounds, computing_dtype


def unroll_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None, stop: bool) -> Rounds:
    """Run the rounds in the log domain; the graph keeps two matrices a round.

    Args:
        logits: (*batch, n, n).
        tau: The temperature.
        num_iters: The most rounds to run.
        tol: The column error a problem stops at, looked at every few rounds.
        stop: Leave the loop when every problem has stopped. Without, stopped problems are kept as they are
            while the loop goes on, which vmap and compiled code can do.
    """
    shift = logits.amax(-2, keepdim=True).detach()  # free: the first step normalises columns
    log_plan = (logits - shift).to(computing_dtype(logits.dtype)) / tau
    running = torch.ones_like(logits[..., 0, 0], dtype=torch.bool)
    rounds = torch.zeros_like(running, dtype=torch.int64)
    for done in range(num_iters):
        log_columns = log_plan.logsumexp(-2, keepdim=True)
        if tol is not None and done and done % STOP_EVERY == 0:
            error = log_columns.detach().expm1().abs().amax((-2, -1))
            running = running & ~(error <= tol)
            if stop and not running.any():
                break
        moved = log_plan - log_columns
        moved = moved - moved.logsumexp(-1, keepdim=True)
        log_plan = moved if tol is None else torch.where(running[..., None, None], moved, log_plan)
        rounds = rounds + running
    plan = log_plan.exp()
    return Rounds(plan, plan.detach().sum(-2), rounds)
