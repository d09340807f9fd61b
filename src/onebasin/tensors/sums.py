"""Sums over tensors whose rounding does not depend on how many threads compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_PIECE = 2**15
"""Entries that PyTorch sums in one thread."""


def sum_pieces(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, other: Tensor) -> list[Tensor]:
    """For a function that is a sum over pairs of entries, its values on pieces of two tensors of one shape.

    On a GPU there is one piece: threads are a matter of the CPU.
    """
    pair = first.reshape(-1), other.reshape(-1)
    if first.is_cuda or first.numel() <= _PIECE:
        return [function(*pair)]
    return [function(x, y) for x, y in zip(*(each.split(_PIECE) for each in pair), strict=True)]


def add_up(pieces: Iterable[Tensor]) -> float:
    """Their sum, rounded once.

    >>> add_up([torch.tensor(1.0), torch.tensor(2.0)])
    3.0
    """
    numbers = list(pieces)
    return math.fsum(torch.stack(numbers).double().tolist()) if numbers else 0.0


def inner(first: Tensor, other: Tensor) -> Tensor:
    """The inner product of two vectors."""
    return (first * other).sum()
