# pyright: reportIndexIssue=false
"""Which kernel a problem gets, how many programs, and the launch."""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.operator.adjoint import MAX_STEPS
from onebasin.operator.rounds import STOP_EVERY, Rounds

LARGEST_SINGLE = 128  # a matrix of this size fills half the registers of a processor
LARGEST_STRIP = 1024  # two matrices of this size fill a quarter of the registers of a large GPU
LARGEST = 8192  # one row is 16 numbers a thread; above, launches no longer matter and plain PyTorch serves
NUM_REGISTERS = 65536  # of a processor


class Team(NamedTuple):
    """How the programs of a launch share the problems."""

    size: int  # programs a problem
    num_teams: int  # problems at a time
    rows: int  # rows a program holds at a time
    num_warps: int


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_known(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 0)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def runs_on(device: torch.device) -> bool:
    """Whether kernels can be compiled here for a CUDA device."""
    return _has_triton() and _is_known(device)


def supports(problems: Tensor) -> bool:
    """Whether the kernels take these problems: float32 arithmetic, a size they hold, a device it knows."""
    return 2 <= problems.shape[-1] <= LARGEST and problems.dtype != torch.float64 and runs_on(problems.device)


def choose_team(n: int, batch: int, num_processors: int) -> Team:
    """Share a launch among problems: all programs must be on the device at once, at most two a processor."""
    padded = _pad(n)
    num_warps = 8 if padded <= 4096 else 16
    rows = max(1, min(16, 8192 // padded))
    programs = num_processors * (2 if num_warps <= 8 else 1)
    num_teams = min(batch, programs)
    size = max(1, min(programs // num_teams, math.ceil(n / rows)))
    return Team(size, num_teams, rows, num_warps)


def choose_strips(n: int, batch: int, num_processors: int) -> Team | None:
    """A team for each problem whose members hold their rows in registers, if all teams are on the device at once."""
    padded = _pad(n)
    if n <= LARGEST_SINGLE:
        return Team(1, batch, padded, {16: 1, 32: 1, 64: 4}.get(padded, 8))
    if n > LARGEST_STRIP:
        return None
    for rows in (8, 16, 32):  # a thin strip is soon done with
        # Few warps wait less for each other; more than 64 numbers a thread do not fit its registers.
        size, num_warps = math.ceil(n / rows), max(4, rows * padded // 2048)
        if num_warps * math.ceil(size * batch / num_processors) <= 8:
            return Team(size, batch, rows, num_warps)
    return None


def launch_rounds(logits: Tensor, tau: float, num_iters: int, tol: float | None, team: Team | None = None) -> Rounds:
    """`run_rounds` by a kernel, on (n, n) or (batch, n, n) logits."""
    logits = logits.contiguous()
    n, shape = logits.shape[-1], logits.shape
    batch = logits.numel() // (n * n)
    plan = torch.empty(shape, dtype=torch.float32, device=logits.device)
    columns = torch.empty(shape[:-1], dtype=torch.float32, device=logits.device)
    rounds = torch.empty(shape[:-2], dtype=torch.int64, device=logits.device)
    outputs = (plan, columns, rounds)
    scale = math.log2(math.e) / tau
    numbers = (n, scale, 1 / scale, num_iters, 0.0 if tol is None else tol, STOP_EVERY)
    strips = choose_strips(n, batch, _num_processors(logits.device)) if team is None else None
    if strips is not None:
        from onebasin.operator.kernels.strip import strip_rounds

        strip_rounds[(strips.size * strips.num_teams,)](
            logits, *outputs, _mail(strips, n, logits.device), batch, *numbers, strips.size, strips.num_teams,
            HAS_TOL=tol is not None, **_strip_options(strips, n, logits.device),
        )  # fmt: skip
        return Rounds(*outputs)
    from onebasin.operator.kernels.team import ROUNDS_VECTORS, team_rounds

    team = team or choose_team(n, batch, _num_processors(logits.device))
    memory, counters = _team_memory(team, ROUNDS_VECTORS + team.size, n, logits.device)
    team_rounds[(team.size * team.num_teams,)](
        logits, *outputs, memory, counters, batch, *numbers, team.size, team.num_teams,
        HAS_TOL=tol is not None, TALL=min(256, _pad(n)), **_team_options(team, n, logits.device),
    )  # fmt: skip
    return Rounds(*outputs)


def launch_gradient(
    plan: Tensor, columns: Tensor, grad: Tensor, tau: float, team: Team | None = None, max_steps: int = MAX_STEPS
) -> Tensor:
    """`implicit_gradient` by a kernel."""
    plan, columns, grad = plan.contiguous(), columns.contiguous(), grad.contiguous()
    n = plan.shape[-1]
    batch = plan.numel() // (n * n)
    result = torch.empty_like(plan)
    strips = choose_strips(n, batch, _num_processors(plan.device)) if team is None else None
    if strips is not None:
        from onebasin.operator.kernels.strip import strip_gradient

        strip_gradient[(strips.size * strips.num_teams,)](
            plan, columns, grad, result, _mail(strips, n, plan.device), batch, n, 1 / tau, max_steps,
            strips.size, strips.num_teams, **_strip_options(strips, n, plan.device),
        )  # fmt: skip
        return result
    from onebasin.operator.kernels.team import GRADIENT_VECTORS, team_gradient

    team = team or choose_team(n, batch, _num_processors(plan.device))
    memory, counters = _team_memory(team, GRADIENT_VECTORS + 2 * team.size, n, plan.device)
    team_gradient[(team.size * team.num_teams,)](
        plan, columns, grad, result, memory, counters, batch, n, 1 / tau, max_steps,
        team.size, team.num_teams, **_team_options(team, n, plan.device),
    )  # fmt: skip
    return result


def _pad(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _mail(team: Team, n: int, device: torch.device) -> Tensor:
    """Where members leave what they found: two halves of a vector each and one more; a program alone needs none."""
    num_words = 2 * (_power(team.size) + 1) * _pad(n) if team.size > 1 else 0
    return torch.zeros(team.num_teams * num_words, dtype=torch.int64, device=device)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _team_memory(team: Team, num_vectors: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    memory = torch.empty(team.num_teams * num_vectors * _pad(n), dtype=torch.float32, device=device)
    return memory, torch.zeros(team.num_teams, dtype=torch.int32, device=device)


def _team_options(team: Team, n: int, device: torch.device) -> dict[str, Any]:
    return {"N": _pad(n), "BLOCK": 32, "ROWS": team.rows, **_launch_options(team, device)}


def _strip_options(team: Team, n: int, device: torch.device) -> dict[str, Any]:
    return {"N": _pad(n), "ROWS": team.rows, "TEAM": _power(team.size), **_launch_options(team, device)}


def _launch_options(team: Team, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": team.num_warps}
    if team.size > 1:
        # The registers are bounded so that all programs fit on the device, and the launch fails if they do
        # not: a program that waits for one that never starts would wait for ever.
        side_by_side = math.ceil(team.size * team.num_teams / _num_processors(device))
        registers = NUM_REGISTERS // (32 * team.num_warps * side_by_side)
        options |= {"maxnreg": min(255, registers // 8 * 8), "launch_cooperative_grid": True}
    return options
