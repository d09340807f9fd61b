"""What processes have used: core seconds, which do not depend on who else is at work, and the most memory they held.

What workers are to run stands here, too: they import it by its name.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from onebasin.relaxation.assignment import assign

TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Of one process; its peak is in bytes."""

    command: str
    core_seconds: float
    peak: int


def read_usage(pid: int) -> Usage | None:
    """Of a process that is running; None if it is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        return Usage(command, (int(fields[11]) + int(fields[12])) / TICKS, int(lines["VmHWM"].split()[0]) * 1024)
    except (OSError, KeyError):
        return None


def read_own_peak() -> int:
    """Of this process, in bytes. What `getrusage` says would begin with the peak of the process that started it."""
    usage = read_usage(os.getpid())
    assert usage is not None, "/proc is not there"
    return usage.peak


def list_descendants(root: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [root]
    while left:
        more = children.get(left.pop(), [])
        found += more
        left += more
    return found


def read_workers() -> dict[int, Usage]:
    """The workers of this process, by their ids: those of the engine "processes", and those of Ray."""
    found = {pid: read_usage(pid) for pid in list_descendants(os.getpid())}
    return {
        pid: usage
        for pid, usage in found.items()
        if usage is not None and (usage.command.startswith("ray::") or "onebasin.engines.worker" in usage.command)
    }


def read_services() -> float:
    """Core seconds of the other processes that this one has started: those of a Ray cluster."""
    workers = read_workers()
    others = [read_usage(pid) for pid in list_descendants(os.getpid()) if pid not in workers]
    return sum(usage.core_seconds for usage in others if usage is not None)


def warm_up(size: int) -> int:
    """Load the solver of assignments, and what PyTorch loads at its first product."""
    return int(assign(torch.rand(size, size) @ torch.rand(size, size))[0])
