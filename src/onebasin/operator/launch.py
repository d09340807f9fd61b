# pyright: reportIndexIssue=false
"""Launching the Triton kernels: which kernel a problem gets, with how many programs, warps and registers.

A grid has `num_slots` slots, each of which solves one problem at a time. In a slot, `num_ranks` programs cooperate.
There are two kinds of kernels: resident ones keep the matrix in registers, streaming ones read it again in every round.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.operator.adjoint import MAX_STEPS
from onebasin.operator.rounds import STOP_EVERY, Rounds

MAX_SINGLE = 128  # units that one program can hold: such a matrix fills half the registers of an SM
MAX_RESIDENT = 1024  # units: two such matrices fill a quarter of the registers of a large GPU
MAX_UNITS = 8192  # a row is then 16 values per thread; above, launches no longer matter and plain PyTorch serves
PATH_COLUMNS = 16  # columns of a tile of `shortest_paths`: two sectors of memory in float32
REGISTERS_PER_SM = 65536


class LaunchConfig(NamedTuple):
    """How the programs of a launch share the problems."""

    num_ranks: int  # programs that cooperate on a problem
    num_slots: int  # problems that are solved at the same time
    rows: int  # rows of a tile, which a program handles at once
    num_warps: int


@functools.cache
def count_sms(device: torch.device) -> int:
    """The number of streaming multiprocessors; 1 on the CPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether Triton kernels can be compiled here for this CUDA device."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 0)


def supports(problems: Tensor) -> bool:
    """Whether the kernels can solve these problems: they compute in float32, up to a largest size."""
    return 2 <= problems.shape[-1] <= MAX_UNITS and problems.dtype != torch.float64 and can_compile(problems.device)


def configure_streaming(n: int, batch: int, num_sms: int) -> LaunchConfig:
    """Share the device among the problems. All programs must be on it at once, at most two per SM."""
    padded = _pad(n)
    num_warps = 8 if padded <= 4096 else 16
    rows = max(1, min(16, 8192 // padded))
    programs = num_sms * (2 if num_warps <= 8 else 1)
    num_slots = min(batch, programs)
    num_ranks = max(1, min(programs // num_slots, math.ceil(n / rows)))
    return LaunchConfig(num_ranks, num_slots, rows, num_warps)


def configure_resident(n: int, batch: int, num_sms: int) -> LaunchConfig | None:
    """A slot for every problem, with all tiles in registers; None if they do not fit on the device at once."""
    padded = _pad(n)
    if n <= MAX_SINGLE:
        return LaunchConfig(1, batch, padded, {16: 1, 32: 1, 64: 4}.get(padded, 8))
    if n > MAX_RESIDENT:
        return None
    for rows in (8, 16, 32):  # small tiles first: they take the least time per round
        # Fewer warps wait less for each other, but a thread has registers for no more than 64 values.
        num_ranks, num_warps = math.ceil(n / rows), max(4, rows * padded // 2048)
        if num_warps * math.ceil(num_ranks * batch / num_sms) <= 8:
            return LaunchConfig(num_ranks, batch, rows, num_warps)
    return None


def launch_rounds(
    logits: Tensor, tau: float, num_iters: int, tol: float | None, streaming: LaunchConfig | None = None
) -> Rounds:
    """`run_rounds` by a kernel, on (n, n) or (batch, n, n) logits; by the streaming one if its configuration is given."""
    logits = logits.contiguous()
    n, shape, device = logits.shape[-1], logits.shape, logits.device
    batch = logits.numel() // (n * n)
    plan = torch.empty(shape, dtype=torch.float32, device=device)
    column_sums = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    outputs = (plan, column_sums, torch.empty(shape[:-2], dtype=torch.int64, device=device))
    scale = math.log2(math.e) / tau
    scalars = (batch, n, scale, 1 / scale, num_iters, 0.0 if tol is None else tol, STOP_EVERY)
    config = configure_resident(n, batch, count_sms(device)) if streaming is None else None
    if config is not None:
        from onebasin.operator.kernels.resident import resident_rounds as kernel

        buffers, options = _prepare_resident(config, n, device)
    else:
        from onebasin.operator.kernels.streaming_rounds import PARTIALS
        from onebasin.operator.kernels.streaming_rounds import streaming_rounds as kernel

        config = streaming or configure_streaming(n, batch, count_sms(device))
        buffers, options = _prepare_streaming(config, n, PARTIALS.value + config.num_ranks, device)
        options["TALL"] = min(256, _pad(n))
    grid, shares = (config.num_ranks * config.num_slots,), (config.num_ranks, config.num_slots)
    kernel[grid](logits, *outputs, *buffers, *scalars, *shares, HAS_TOL=tol is not None, **options)
    return Rounds(*outputs)


def launch_gradient(
    plan: Tensor,
    column_sums: Tensor,
    grad: Tensor,
    tau: float,
    streaming: LaunchConfig | None = None,
    max_steps: int = MAX_STEPS,
) -> Tensor:
    """`implicit_gradient` by a kernel; by the streaming one if its configuration is given."""
    plan, column_sums, grad = plan.contiguous(), column_sums.contiguous(), grad.contiguous()
    n, device = plan.shape[-1], plan.device
    batch = plan.numel() // (n * n)
    result = torch.empty_like(plan)
    scalars = (batch, n, 1 / tau, max_steps)
    config = configure_resident(n, batch, count_sms(device)) if streaming is None else None
    if config is not None:
        from onebasin.operator.kernels.resident import resident_gradient as kernel

        buffers, options = _prepare_resident(config, n, device)
    else:
        from onebasin.operator.kernels.streaming_gradient import PARTIALS
        from onebasin.operator.kernels.streaming_gradient import streaming_gradient as kernel

        config = streaming or configure_streaming(n, batch, count_sms(device))
        buffers, options = _prepare_streaming(config, n, PARTIALS.value + 2 * config.num_ranks, device)
    grid, shares = (config.num_ranks * config.num_slots,), (config.num_ranks, config.num_slots)
    kernel[grid](plan, column_sums, grad, result, *buffers, *scalars, *shares, **options)
    return result


def configure_paths(n: int, batch: int, num_sms: int) -> LaunchConfig:
    """Share the device among the problems, one program per SM; a tile has 256 rows at most, and `PATH_COLUMNS` columns."""
    num_slots = min(batch, num_sms)
    num_ranks = max(1, min(num_sms // num_slots, math.ceil(n / PATH_COLUMNS)))
    return LaunchConfig(num_ranks, num_slots, min(_pad(n), 256), 8 if n > 128 else 4)


def launch_paths(
    scores: Tensor, row_duals: Tensor, prices: Tensor, rows: Tensor, reach: Tensor, config: LaunchConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The distance of every column from the free rows of (batch, n, n) problems, and the row before it on that path.

    Args:
        scores: of any floating type, or integers.
        row_duals: (batch, n), float64; with the prices they exceed the scores everywhere.
        prices: (batch, n), float64, of the columns.
        rows: (batch, n), the row of each column, -1 where it has none.
        reach: (batch, n), 0 for the rows without a column, infinite for others.
        config: how programs share the problems, if not as `configure_paths` says.
    """
    from onebasin.operator.kernels.shortest_paths import shortest_paths as kernel

    batch, n = rows.shape
    config = config or configure_paths(n, batch, count_sms(scores.device))
    lengths = reach.repeat_interleave(3, 0).contiguous()  # of three rounds, see the kernel
    distances, parents = torch.full_like(prices, math.inf), torch.zeros_like(rows)
    last_changes, counters = torch.zeros(2, max(batch, config.num_slots), dtype=torch.int32, device=scores.device)
    kernel[(config.num_ranks * config.num_slots,)](
        scores.contiguous(), row_duals.contiguous(), prices.contiguous(), rows.contiguous(), lengths, distances, parents,
        last_changes, counters, batch, n, config.num_ranks, config.num_slots,
        ROWS=config.rows, BLOCK=PATH_COLUMNS, **_launch_options(config, scores.device),
    )  # fmt: skip
    return distances, parents


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _pad(n: int) -> int:
    return max(16, _next_power_of_2(n))


def _prepare_resident(config: LaunchConfig, n: int, device: torch.device) -> tuple[tuple[Tensor], dict[str, Any]]:
    """The message buffer and the constants of a resident kernel.

    A slot has two buffers, each with a vector per rank and one for the result; a program alone sends no messages.
    """
    ranks = _next_power_of_2(config.num_ranks)
    num_words = 2 * (ranks + 1) * _pad(n) if config.num_ranks > 1 else 0
    messages = torch.zeros(config.num_slots * num_words, dtype=torch.int64, device=device)
    return (messages,), {"N": _pad(n), "ROWS": config.rows, "RANKS": ranks, **_launch_options(config, device)}


def _prepare_streaming(
    config: LaunchConfig, n: int, num_vectors: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """The workspace, the counters of the barriers, and the constants of a streaming kernel."""
    workspace = torch.empty(config.num_slots * num_vectors * _pad(n), dtype=torch.float32, device=device)
    counters = torch.zeros(config.num_slots, dtype=torch.int32, device=device)
    return (workspace, counters), {"N": _pad(n), "BLOCK": 32, "ROWS": config.rows, **_launch_options(config, device)}


def _launch_options(config: LaunchConfig, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.num_warps}
    if config.num_ranks > 1:
        # Registers are bounded so that all programs fit on the device, and a cooperative launch fails if they do
        # not: otherwise a program could wait forever for one that never starts.
        programs_per_sm = math.ceil(config.num_ranks * config.num_slots / count_sms(device))
        registers = REGISTERS_PER_SM // (32 * config.num_warps * programs_per_sm)
        options |= {"maxnreg": min(255, registers // 8 * 8), "launch_cooperative_grid": True}
    return options
