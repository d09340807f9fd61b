"""Sums over tensors whose rounding does not depend on how many threads compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_PIECE = 2**15
"""Entries that PyTorch sums in one thread."""


def sum_pieces(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, other: Tensor) -> list[float]:
    """For a function that is a sum over pairs of entries, its values on pieces of two tensors of one shape.

    On a GPU there is one piece: threads are a matter of the CPU. Values are plain numbers: small tensors that stay while
    large ones come and go would keep the memory of these from being used again.
    """
    pair = first.reshape(-1), other.reshape(-1)
    if first.is_cuda or first.numel() <= _PIECE:
        return [float(function(*pair))]
    pieces = [function(x, y) for x, y in zip(*(each.split(_PIECE) for each in pair), strict=True)]
    return torch.stack(pieces).double().tolist()


def add_up(pieces: Iterable[float]) -> float:
    """Their sum, rounded once.

    >>> add_up([1.0, 2.0])
    3.0
    """
    return math.fsum(pieces)


def inner(first: Tensor, other: Tensor) -> Tensor:
    """The inner product of two vectors."""
    return (first * other).sum()
