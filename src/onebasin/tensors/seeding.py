"""Reproducible random numbers that leave the user's generators alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Within it the global generators of the CPU and of a CUDA device are seeded; afterwards they are as they were.

    Args:
        seed: for both.
        device: by default the current CUDA device, if CUDA is in use.
    """
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    on_cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
