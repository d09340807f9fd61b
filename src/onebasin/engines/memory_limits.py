"""What work needs in memory, said before it begins, and refused if there is not as much."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BASE = 4 * 10**8 if torch.version.cuda is None else 65 * 10**7
"""What a process holds before it reads a tensor: Python and PyTorch, as measured for builds without and with CUDA."""
_DEVICE_BASE = 6 * 10**8
"""What PyTorch and its libraries take of a GPU for each process, and about as much of the host's memory."""


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    return min(free, _left_in_container(Path("/sys/fs/cgroup"), free))


def _left_in_container(folder: Path, default: int) -> int:
    """What a container may still take; the default if nothing limits it. Cached files give way, and do not count as held."""
    try:
        most, held = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - int(held) + int(counts["inactive_file"]) if most != "max" else default
    except (OSError, ValueError, KeyError):
        return default


def read_bytes(text: str) -> int:
    """A number of bytes with a unit.

    Raises:
        ValueError: if it is none.

    >>> read_bytes("8GB"), read_bytes("500 MB"), read_bytes("1.5e9")
    (8000000000, 500000000, 1500000000)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+]?[0-9]+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or not 0 < number < math.inf:
        raise ValueError(f"cannot read {text!r} as an amount of memory: write 8GB, 500MB or the like")
    return int(number * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that work holds at a time, beside what a process holds anyway.

    Attributes:
        driver: in the process that gives out work.
        worker: in each that does it.
        results: of all results that are under way: in the driver, or in the object store of a cluster.
        device: on the GPU, for each worker; 0 if there is none.
    """

    driver: int
    worker: int
    results: int = 0
    device: int = 0

    @property
    def in_worker(self) -> int:
        """All that a worker holds on its host."""
        return self.worker + _BASE + (_DEVICE_BASE if self.device else 0)

    @property
    def in_driver(self) -> int:
        """All that the process that gives out work holds; it asks a GPU what is free there."""
        return self.driver + self.results + _BASE + (_DEVICE_BASE // 2 if self.device else 0)

    def describe(self, workers: int, is_remote: bool) -> str:
        """In a sentence."""
        on_device = f", and {in_gb(self.device + _DEVICE_BASE)} of a GPU" if self.device else ""
        if not is_remote:
            return f"this process will hold about {in_gb(self.total(workers, is_remote))}{on_device}"
        each, own = in_gb(self.in_worker), in_gb(self.in_driver)
        who = f"each of {workers} workers" if workers > 1 else "the worker"
        return f"{who} will hold about {each}{on_device}, and this process {own}"

    def total(self, workers: int, is_remote: bool) -> int:
        """Of all processes of a machine; `is_remote` if workers are processes of their own."""
        return self.in_driver + workers * self.in_worker if is_remote else self.driver + self.results + self.in_worker

    def fit_workers(self, available: int) -> int:
        """How many workers there is room for beside this process."""
        return max(0, (available - self.in_driver) // self.in_worker)


def check_host(need: MemoryEstimate, workers: int, is_remote: bool, limit: int | None) -> None:
    """Refuse work that does not fit into the memory of this machine.

    Args:
        need: of the work.
        workers: on this machine.
        is_remote: whether workers are processes of their own.
        limit: bytes that all processes on this machine may hold together; what is free if None.

    Raises:
        ValueError: with what is needed, what there is, and what to do.
    """
    available = available_memory(torch.device("cpu")) if limit is None else limit
    total = need.total(workers, is_remote)
    if available is None or total <= available:
        return
    room = need.fit_workers(available) if is_remote else 0
    advice = f"take {room} worker{'s' if room > 1 else ''}" if room > 0 else "take a machine with more memory"
    bound = f"{in_gb(available)} are free" if limit is None else f"the limit is {in_gb(limit)}"
    raise ValueError(f"{need.describe(workers, is_remote)}, {in_gb(total)} together, and {bound}: {advice}")


def check_device(need: MemoryEstimate, workers: int, available: int) -> None:
    """Refuse work that does not fit into the memory of a GPU.

    Args:
        need: of the work.
        workers: that share the GPU.
        available: bytes that are free on it.

    Raises:
        ValueError: with what is needed, what there is, and what to do.
    """
    each = need.device + _DEVICE_BASE
    if workers * each > available:
        room = available // each
        advice = f"take {room} worker{'s' if room > 1 else ''} for each GPU" if room else "take --device cpu"
        who = f"{workers} worker{'s' if workers > 1 else ''}"
        raise ValueError(
            f"{who} on one GPU will hold about {in_gb(workers * each)} of it, and {in_gb(available)} are free: {advice}"
        )


def in_gb(count: int) -> str:
    """Bytes for people.

    >>> in_gb(2_400_000_000)
    '2.40 GB'
    """
    return f"{count / 1e9:.2f} GB"
