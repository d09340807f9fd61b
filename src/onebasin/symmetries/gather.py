"""Moving the entries of a tensor by permutations of its axes."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_TILE_BYTES = 1 << 20  # a tile should stay in the cache between its two gathers
_THREAD_BYTES = 1 << 24  # below, threads of ours gain nothing over those that PyTorch has for each gather
_SHORT_RUN_BYTES = 128  # below, tiles are faster than one gather over a flattened view
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that PyTorch does not gather, and others of the same size that it does."""


def gather(tensor: Tensor, indices: tuple[Tensor | None, ...]) -> Tensor:
    """new[i, j, ...] = old[a[i], b[j], ...], for indices as `layout.gather_indices` makes them.

    The axes behind the last index move as contiguous runs. Long runs are gathered in one pass over a flattened view;
    for short ones that would read eight bytes of index for every entry, so rows and columns are gathered tile by tile.
    """
    moved = [axis for axis, index in enumerate(indices) if index is not None]
    if not moved or tensor.numel() == 0:
        return tensor
    if tensor.is_meta:
        return torch.empty_like(tensor)
    if tensor.dtype in _MOVED_AS:
        return gather(tensor.view(_MOVED_AS[tensor.dtype]), indices).view(tensor.dtype)
    spanned = [d for i in indices if i is not None and i.dim() > 1 for d, n in enumerate(i.shape) if n > 1]
    leading = [
        torch.arange(n, device=tensor.device) if index is None else index
        for n, index in zip(tensor.shape[: max(moved + spanned) + 1], indices, strict=False)
    ]
    if len(moved) == 1 and not spanned:
        return tensor.index_select(moved[0], leading[moved[0]])
    mesh = [
        index.view([-1 if i == axis else 1 for i in range(len(leading))])
        if index.dim() == 1
        else index.view(index.shape[: len(leading)])
        for axis, index in enumerate(leading)
    ]
    if not tensor.is_cpu:
        return tensor[tuple(mesh)]
    tensor = tensor.contiguous()
    run = math.prod(tensor.shape[len(leading) :])
    if moved == [0, 1] and not spanned and run * tensor.element_size() < _SHORT_RUN_BYTES:
        return _gather_tiles(tensor, leading[0], leading[1])
    flat = mesh[0]
    for n, index in zip(tensor.shape[1:], mesh[1:], strict=False):
        flat = flat * n + index
    return tensor.view(-1, run).index_select(0, flat.expand(tensor.shape[: len(mesh)]).reshape(-1)).view(tensor.shape)


def _gather_tiles(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Rows into a tile that stays in the cache, then its columns into place: one pass over memory, on all threads."""
    result = torch.empty_like(tensor)
    height = max(1, _TILE_BYTES // max(1, tensor[0].nbytes))
    in_inference = torch.is_inference_mode_enabled()  # which new threads do not know

    def move(share: Tensor, start: int) -> None:
        with torch.inference_mode(in_inference):
            tile = tensor.new_empty((height, *tensor.shape[1:]))
            for offset, chosen in enumerate(share.split(height)):
                first = start + offset * height
                part = tile[: len(chosen)]
                torch.index_select(tensor, 0, chosen, out=part)
                torch.index_select(part, 1, columns, out=result[first : first + len(chosen)])

    num_threads = min(torch.get_num_threads(), tensor.nbytes // _THREAD_BYTES)
    if num_threads < 2:
        move(rows, 0)
        return result
    shares = rows.chunk(num_threads)
    starts = [sum(len(s) for s in shares[:i]) for i in range(len(shares))]
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(move, shares, starts))
    return result
