"""The Sinkhorn operator: logits to a doubly stochastic plan, differentiable."""

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from onebasin.operator.adjoint import MAX_STEPS
from onebasin.operator.implicit import plan_implicitly
from onebasin.operator.rounds import computing_dtype
from onebasin.operator.unrolled import unroll_rounds
from onebasin.torch_internals import is_batched


@dataclass(frozen=True)
class SinkhornInfo:
    """What happened in a call of `sinkhorn`. Every field has the batch shape of the logits.

    Attributes:
        rounds: Rounds that were run.
        marginal_error: Largest distance of a column sum from one (rows are normalised last, they sum to one).
        saturation: Share of rows whose largest entry cannot be told from one. Their gradient has vanished, so a
            descent no longer changes them. Raise tau, or bound the range of the logits.
    """

    rounds: Tensor
    marginal_error: Tensor
    saturation: Tensor


@overload
def sinkhorn(
    logits: Tensor,
    tau: float = 1.0,
    num_iters: int = 20,
    tol: float | None = None,
    gradient: Literal["implicit", "unrolled"] = "implicit",
    check: bool = True,
    return_info: Literal[False] = False,
    solver_steps: int = MAX_STEPS,
) -> Tensor: ...


@overload
def sinkhorn(
    logits: Tensor,
    tau: float = 1.0,
    num_iters: int = 20,
    tol: float | None = None,
    gradient: Literal["implicit", "unrolled"] = "implicit",
    check: bool = True,
    *,
    return_info: Literal[True],
    solver_steps: int = MAX_STEPS,
) -> tuple[Tensor, SinkhornInfo]: ...


def sinkhorn(
    logits: Tensor,
    tau: float = 1.0,
    num_iters: int = 20,
    tol: float | None = None,
    gradient: Literal["implicit", "unrolled"] = "implicit",
    check: bool = True,
    return_info: bool = False,
    solver_steps: int = MAX_STEPS,
) -> Tensor | tuple[Tensor, SinkhornInfo]:
    """Turn logits into a doubly stochastic plan: normalise the columns and rows of exp(logits / tau) in turn.

    One round normalises the columns, then the rows. So rows always sum to one, and columns do once the rounds
    have converged. The sharper the logits (or the smaller tau), the closer the plan is to a permutation and
    the more rounds it takes.

    Args:
        logits: (*batch, m, n) of any floating type, m <= n. -inf forbids an entry. With fewer rows than columns, rows sum
            to one and columns to at most one: m rows choose among n columns, as in `onebasin.assign`.
        tau: Temperature. Small is sharp.
        num_iters: The number of rounds; the largest number if ``tol`` is given.
        tol: Stop a problem once its column sums differ from one by at most this. Checked every fourth round.
        gradient: "implicit" differentiates the fixed point with the marginals that were reached: memory and
            time do not grow with the rounds. "unrolled" differentiates the rounds that were run, exactly; it
            keeps two matrices per round and can be differentiated twice. They agree where the rounds converged.
        check: Raise on logits that have no plan. Waits for the result; off in compiled code, under vmap and
            during the capture of a CUDA graph.
        return_info: Also return a `SinkhornInfo`.
        solver_steps: The largest number of conjugate gradient steps in the implicit gradient. Each step lowers its
            error. A sharp plan needs dozens to reach rounding; the gradient of a random batch does not need that.

    Returns:
        The plan, in the shape and type of the logits (float16 and bfloat16 are computed in float32), and the
        `SinkhornInfo` if asked for.

    Raises:
        ValueError: A bad argument; with ``check``, NaN or +inf in the logits, or a row or column all -inf.
        TypeError: The logits are not a floating tensor.

    >>> import torch
    >>> import onebasin as ob
    >>> ob.sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    tensor([[0.8808, 0.1192],
            [0.1192, 0.8808]])
    """
    _check_arguments(logits, tau, num_iters, tol, gradient)
    if solver_steps < 1:
        raise ValueError(f"solver_steps must be at least 1, but is {solver_steps}.")
    num_rows, size = logits.shape[-2:]
    if num_rows < size:  # further rows take what is left of the columns; a constant in a row does not change its plan
        given, logits = logits, torch.cat([logits, logits.new_zeros(*logits.shape[:-2], size - num_rows, size)], -2)
        options = {"tau": tau, "num_iters": num_iters, "tol": tol, "gradient": gradient, "solver_steps": solver_steps}
        try:
            whole, info = sinkhorn(logits, check=check, return_info=True, **options)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(_explain_failure(given.detach(), tau, has_spare_columns=True)) from error
        plan = whole[..., :num_rows, :]
        return (plan, info) if return_info else plan
    readable = _is_readable(logits)
    if gradient == "implicit":
        result, plan, column_sums, rounds = plan_implicitly(logits, float(tau), num_iters, tol, solver_steps)
    else:
        plan, column_sums, rounds = unroll_rounds(logits, float(tau), num_iters, tol, stop=readable)
        result = plan.to(logits.dtype)
    # One sum, because each value that is read costs a wait. The column sums add up to n, or to inf or NaN.
    if check and readable and not math.isfinite(column_sums.detach().sum()):
        raise ValueError(_explain_failure(logits.detach(), tau))
    if not return_info:
        return result
    hard = plan.detach().amax(-1) >= 1 - 4 * torch.finfo(computing_dtype(logits.dtype)).eps
    error = (column_sums - 1).abs().amax(-1)
    return result, SinkhornInfo(rounds, error, hard.to(plan.dtype).mean(-1))


def _check_arguments(logits: Tensor, tau: float, num_iters: int, tol: float | None, gradient: str) -> None:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"sinkhorn takes a floating tensor of logits, but got {kind}. Convert it with .float().")
    if logits.ndim < 2 or not 0 < logits.shape[-2] <= logits.shape[-1]:
        raise ValueError(
            f"sinkhorn takes logits of shape (*batch, m, n) with 1 <= m <= n, but got {tuple(logits.shape)}: "
            "exchange rows and columns if there are more rows."
        )
    if not (tau > 0 and math.isfinite(tau)):
        raise ValueError(f"tau must be positive and finite, but is {tau}. Small values make sharp plans.")
    if num_iters < 1:
        raise ValueError(f"num_iters must be at least 1, but is {num_iters}.")
    if tol is not None and not tol > 0:
        raise ValueError(f"tol must be positive, but is {tol}. Leave it None to run all {num_iters} rounds.")
    if gradient not in ("implicit", "unrolled"):
        raise ValueError(f"gradient must be 'implicit' or 'unrolled', but is {gradient!r}.")


def _is_readable(tensor: Tensor) -> bool:
    """Whether the values can be read back to the host now."""
    if torch.compiler.is_compiling() or is_batched(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _explain_failure(logits: Tensor, tau: float, has_spare_columns: bool = False) -> str:
    """Say why the logits have no plan. Spare columns may be forbidden."""
    for name, bad in (("NaN", logits.isnan()), ("+inf", logits.isposinf())):
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            return (
                f"sinkhorn takes finite logits, or -inf to forbid an entry, but {int(bad.sum())} of"
                f" {bad.numel()} are {name}, the first at {first}. Look at what made them."
            )
    for name, dim in (("row", -1),) if has_spare_columns else (("row", -1), ("column", -2)):
        empty = logits.isneginf().all(dim)
        if empty.any():
            first = tuple(empty.nonzero()[0].tolist())
            return (
                f"every row and column needs an entry that is not -inf, but {int(empty.sum())} have none, "
                f"the first is {name} {first}. Allow at least one entry there."
            )
    return (
        f"the plan is not finite although the logits are: their range, {float(logits.abs().amax()):.1e} at "
        f"tau = {tau}, is too wide for {logits.dtype}. Scale the logits down or raise tau."
    )
