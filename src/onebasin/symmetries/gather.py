"""Moving the entries of a tensor by permutations of its axes."""

import math
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.tensors.huge_pages import ask_for_huge_pages

_BLOCK_BYTES = 1 << 20  # a block should stay in the cache between its two gathers
_SMALL_BYTES = 1 << 16  # below, cutting a tensor into blocks takes longer than moving it
_THREAD_BYTES = 1 << 24  # for each thread: with less to move it takes longer to start one than it saves
_SHORT_RUN_BYTES = 128  # below, blocks are faster than one gather over a flattened view
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that PyTorch does not gather, and others of the same size that it does."""


class Block(NamedTuple):
    """Rows of a new tensor that are not filled yet: ``target = source[rows][:, columns]``, None for all in order."""

    source: Tensor
    rows: Tensor | None
    columns: Tensor | None
    target: Tensor


def gather(tensor: Tensor, indices: tuple[Tensor | None, ...], later: list[Block] | None = None) -> Tensor:
    """new[i, j, ...] = old[a[i], b[j], ...], for indices as `layout.gather_indices` makes them.

    The axes behind the last index move as contiguous runs. Long runs are gathered in one pass over a flattened view;
    for short ones that would read eight bytes of index for every entry, so rows and columns are gathered block by block.

    Args:
        tensor: the old entries.
        indices: for each axis where its entries come from; None where they stay.
        later: takes the blocks of the result, if it is a large one on the CPU, for `fill`: so those of many tensors are
            filled side by side. Without it they are filled before this returns.
    """
    moved = [axis for axis, index in enumerate(indices) if index is not None]
    if not moved or tensor.numel() == 0:
        return tensor
    if tensor.is_meta:
        return torch.empty_like(tensor)
    if tensor.dtype in _MOVED_AS:
        return gather(tensor.view(_MOVED_AS[tensor.dtype]), indices, later).view(tensor.dtype)
    spanned = [d for i in indices if i is not None and i.dim() > 1 for d, n in enumerate(i.shape) if n > 1]
    run = math.prod(tensor.shape[max(moved + spanned) + 1 :])
    is_short = len(moved) == 1 or run * tensor.element_size() < _SHORT_RUN_BYTES
    if tensor.is_cpu and max(moved) < 2 and not spanned and is_short:
        rows, columns = (*indices, None)[:2]
        return _gather_rows_and_columns(tensor, rows, columns, later)
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
    flat = mesh[0]
    for n, index in zip(tensor.shape[1:], mesh[1:], strict=False):
        flat = flat * n + index
    flat = flat.expand(tensor.shape[: len(mesh)]).reshape(-1)
    return tensor.contiguous().view(-1, run).index_select(0, flat).view(tensor.shape)


def _gather_rows_and_columns(
    tensor: Tensor, rows: Tensor | None, columns: Tensor | None, later: list[Block] | None
) -> Tensor:
    has_memory = type(tensor) is Tensor and tensor.layout == torch.strided
    if not has_memory or tensor.requires_grad or tensor.nbytes < _SMALL_BYTES:
        tensor = tensor if rows is None else tensor.index_select(0, rows)
        return tensor if columns is None else tensor.index_select(1, columns)
    tensor = tensor.contiguous()
    result = torch.empty_like(tensor)
    ask_for_huge_pages(result)
    height = max(1, _BLOCK_BYTES // tensor[0].nbytes)
    targets = result.split(height)
    sources = tensor.split(height) if rows is None else [tensor] * len(targets)
    parts = [None] * len(targets) if rows is None else rows.split(height)
    blocks = [Block(s, r, columns, t) for s, r, t in zip(sources, parts, targets, strict=True)]
    if later is None:
        fill(blocks)
    else:
        later.extend(blocks)
    return result


def fill(blocks: Iterable[Block]) -> None:
    """Move the entries of blocks, on as many threads as PyTorch uses."""
    waiting = deque(blocks)
    num_bytes = [block.target.nbytes for block in waiting]
    num_others = min(torch.get_num_threads(), sum(num_bytes) // _THREAD_BYTES) - 1  # beside the one that calls
    in_inference = torch.is_inference_mode_enabled()  # which new threads do not know

    def work() -> None:
        with torch.inference_mode(in_inference):
            scratch = torch.empty(max(num_bytes, default=0), dtype=torch.uint8)
            while waiting:
                try:
                    block = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                _fill_block(block, scratch)

    if num_others < 1:
        work()
        return
    with ThreadPoolExecutor(num_others) as pool:
        others = [pool.submit(work) for _ in range(num_others)]
        work()
    for other in others:
        other.result()


def _fill_block(block: Block, scratch: Tensor) -> None:
    """Rows into memory that stays in the cache, then their columns into place.

    Along its second axis `index_select` uses one thread, along the first as many as it can: those would be in each
    other's way, so rows are selected along the second axis of a view.
    """
    source, rows, columns, target = block
    if rows is not None:
        chosen = target if columns is None else scratch[: target.nbytes].view(target.dtype).view(target.shape)
        torch.index_select(source.unsqueeze(0), 1, rows, out=chosen.unsqueeze(0))
        source = chosen
    if columns is not None:
        torch.index_select(source, 1, columns, out=target)
