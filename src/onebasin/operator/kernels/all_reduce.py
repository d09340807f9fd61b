# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""An all-reduce among the programs that share a problem, through a message buffer in global memory.

Each float32 value is packed into one 64-bit word with its epoch, the number of the exchange that it belongs to. One read
returns both, so a program that sees the epoch it waits for also has the value. This needs no counters and no fences (the
low-latency protocol of NCCL works the same way). Epochs alternate between two buffers, so that a program which is one epoch
ahead does not overwrite what others still read. The buffers start as zeros, and the first epoch is 1.

If a program had more threads than words to read, two threads would read the same word, and the value might have arrived for
only one of them. A program therefore has at most N threads.
"""

import triton
import triton.language as tl


@triton.jit
def _store_packed(pointers, values, epoch, mask):
    bits = values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(pointers, bits | (tl.cast(epoch, tl.int64) << 32), mask=mask, cache_modifier=".cg")


@triton.jit
def _load_packed(pointers, epoch, mask):
    """Spin until every word carries this epoch, and return the values; zero where masked."""
    flag = tl.cast(epoch, tl.int64) << 32
    words = tl.load(pointers, mask=mask, other=flag, volatile=True)
    while tl.min((words >> 32).to(tl.int32)) < epoch:
        words = tl.load(pointers, mask=mask, other=flag, volatile=True)
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def all_reduce(
    vector, messages, rank, num_ranks, epoch, MAX: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """The sum (or the maximum, if MAX) over all ranks of their vectors of N values, bitwise the same on every rank.

    Each rank reduces ROWS of the columns and sends the result to the others: a reduce-scatter, then an all-gather.
    """
    if RANKS == 1:
        result = vector
    else:
        column, sender, own = tl.arange(0, N), tl.arange(0, RANKS), rank * ROWS + tl.arange(0, ROWS)
        buffer = messages + epoch % 2 * (RANKS + 1) * N
        _store_packed(buffer + rank * N + column, vector, epoch, column < N)
        mask = (sender < num_ranks)[:, None] & (own < N)[None, :]
        received = _load_packed(buffer + sender[:, None] * N + own[None, :], epoch, mask)
        if MAX:
            total = tl.max(tl.where(mask, received, -float("inf")), 0)
        else:
            total = tl.sum(received, 0)
        _store_packed(buffer + RANKS * N + own, total, epoch, own < N)
        result = _load_packed(buffer + RANKS * N + column, epoch, column < num_ranks * ROWS)
    return result
