"""The rounds as ordinary differentiable operations: their gradient is exact for the rounds that were run."""

import torch
from torch import Tensor

from onebasin.operator.rounds import STOP_EVERY, Rounds, computing_dtype


def unroll_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None, stop: bool) -> Rounds:
    """Run the rounds in the log domain; the autograd graph keeps two matrices per round.

    Args:
        logits: (*batch, n, n).
        tau: The temperature.
        num_iters: The most rounds to run.
        tol: The column error at which a problem stops, checked every few rounds.
        stop: Leave the loop when every problem has stopped. Otherwise the loop goes on and leaves stopped problems
            unchanged, which works under vmap and in compiled code too.
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
        new = log_plan - log_columns
        new = new - new.logsumexp(-1, keepdim=True)
        log_plan = new if tol is None else torch.where(running[..., None, None], new, log_plan)
        rounds = rounds + running
    plan = log_plan.exp()
    return Rounds(plan, plan.detach().sum(-2), rounds)
