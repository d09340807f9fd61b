"""What work needs in memory, said before it begins, and refused if there is not as much."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BASE = 4 * 10**8
"""What a process holds before it reads a tensor: Python and PyTorch, as measured."""


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def read_bytes(text: str) -> int:
    """A number of bytes with a unit.

    Raises:
        ValueError: if it is none.

    >>> read_bytes("8GB"), read_bytes("500 MB"), read_bytes("1.5e9")
    (8000000000, 500000000, 1500000000)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or not number > 0:
        raise ValueError(f"cannot read {text!r} as an amount of memory: write 8GB, 500MB or the like")
    return int(number * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class Need:
    """Bytes that work holds at a time, beside what a process holds anyway.

    Attributes:
        driver: in the process that gives out work.
        worker: in each that does it.
    """

    driver: int
    worker: int

    def describe(self, workers: int, apart: bool) -> str:
        """In a sentence."""
        if not apart:
            return f"this process will hold about {_in_gb(self.total(workers, apart))}"
        each, own = _in_gb(self.worker + _BASE), _in_gb(self.driver + _BASE)
        return f"each of {workers} workers will hold about {each}, and this process {own}"

    def total(self, workers: int, apart: bool) -> int:
        """Of all processes; `apart` if workers are processes of their own."""
        return self.driver + _BASE + (workers * (self.worker + _BASE) if apart else self.worker)


def check_memory(need: Need, workers: int, apart: bool, limit: int | None) -> str:
    """Refuse work that does not fit.

    Args:
        need: of the work.
        workers: on this machine.
        apart: whether workers are processes of their own.
        limit: bytes that all processes on this machine may hold; what is free if None.

    Returns:
        What will be held, in a sentence.

    Raises:
        ValueError: with both numbers, and what to do.
    """
    available = available_memory(torch.device("cpu")) if limit is None else limit
    total, said = need.total(workers, apart), need.describe(workers, apart)
    if available is not None and total > available:
        room = (available - need.driver - _BASE) // (need.worker + _BASE) if apart else 0
        advice = f"take {room} workers" if room > 0 else "take a machine with more memory"
        bound = f"{_in_gb(available)} are free" if limit is None else f"the limit is {_in_gb(limit)}"
        raise ValueError(f"{said}, {_in_gb(total)} together, and {bound}: {advice}")
    return said


def _in_gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
