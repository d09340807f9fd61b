# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""How the programs that share a problem wait for each other between phases, and read what the others wrote.

Waiting is safe because the launch is cooperative: either all programs are on the device, or none is.
"""

import triton
import triton.language as tl


@triton.jit
def barrier(counter, arrivals, num_ranks):
    """Wait until all ranks have arrived; what they wrote before can then be read. Returns the new number of arrivals."""
    arrivals += num_ranks
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    tl.debug_barrier()
    return arrivals


@triton.jit
def load_l2(pointers, mask):
    """Load what another program may have written: from the L2 cache, because the L1 cache may hold an old value."""
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def sum_partials(partials, column, column_mask, num_ranks, N: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over all ranks of BLOCK columns of their partial sums, a vector of N per rank."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_ranks, 32):
        rank = first + tl.arange(0, 32)
        mask = (rank < num_ranks)[:, None] & column_mask[None, :]
        total += tl.sum(load_l2(partials + rank[:, None] * N + column[None, :], mask), 0)
    return total
