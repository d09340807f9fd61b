"""Large tensors in blocks of rows, so that no more than a block of one has to be held at a time.

How a tensor is cut depends on its shape alone: so whoever computes a sum over its blocks computes the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from onebasin.tensors.states import LazyState

MAX_ENTRIES = 2**24
"""Of a block: 67 MB in float32."""
_MULTIPLE = 32


def list_blocks(shape: Tensor) -> list[tuple[int, int]]:
    """First rows of the blocks of a tensor, and the rows behind their last; one block if it is small.

    >>> import torch
    >>> list_blocks(torch.empty(20_000, 2048, device="meta"))
    [(0, 8192), (8192, 16384), (16384, 20000)]
    """
    if shape.dim() == 0 or shape.numel() <= MAX_ENTRIES:
        return [(0, shape.shape[0] if shape.dim() else 1)]
    width = shape[0].numel()
    height = max(1, MAX_ENTRIES // width // _MULTIPLE * _MULTIPLE)
    return [(start, min(start + height, len(shape))) for start in range(0, len(shape), height)]


def count_entries(shape: Tensor) -> int:
    """Of the largest block of a tensor.

    >>> import torch
    >>> count_entries(torch.empty(20_000, 2048, device="meta")) == MAX_ENTRIES
    True
    """
    start, stop = list_blocks(shape)[0]
    return shape[start:stop].numel() if shape.dim() else 1


def name_block(key: str, start: int, stop: int) -> str:
    """Of a block of a tensor.

    >>> name_block("embed.weight", 0, 512)
    'embed.weight[0:512]'
    """
    return f"{key}[{start}:{stop}]"


def cut_rows(state: LazyState, keys: Collection[str]) -> LazyState:
    """A state in which each of some tensors is several, a block of its rows each."""
    places: dict[str, tuple[str, int, int]] = {}
    shapes: dict[str, Tensor] = {}
    for key, shape in state.shapes.items():
        if key not in keys:
            shapes[key] = shape
            continue
        for start, stop in list_blocks(shape):
            name = name_block(key, start, stop)
            places[name], shapes[name] = (key, start, stop), shape[start:stop]
    return LazyState(shapes, _CutReader(state, places), state.device)


@dataclass(frozen=True)
class _CutReader:
    state: LazyState
    places: Mapping[str, tuple[str, int, int]]

    def __call__(self, key: str) -> Tensor:
        return self.state.read_rows(*self.places[key]) if key in self.places else self.state[key]
