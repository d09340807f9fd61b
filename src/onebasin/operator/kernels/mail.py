# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""How the members of a team tell each other what they found, without counters and fences.

A number travels in one word with a stamp, the turn it belongs to: who reads the stamp has read the number. So a message
takes a write and a read, and nobody waits for anything but the numbers. Turns use the two halves of the mail by turns: a
member that is one turn ahead leaves alone what others still read. The mail is zero before the first turn, which is 1.

Where a program has more threads than words to read, two threads read one, and it may have come for one of them alone. So a
program has at most N threads.
"""

import triton
import triton.language as tl


@triton.jit
def _send(places, numbers, turn, mask):
    bits = numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(places, bits | (tl.cast(turn, tl.int64) << 32), mask=mask, cache_modifier=".cg")


@triton.jit
def _receive(places, turn, mask):
    """Numbers sent in this turn, as soon as all have come; zero where masked."""
    stamp = tl.cast(turn, tl.int64) << 32
    words = tl.load(places, mask=mask, other=stamp, volatile=True)
    while tl.min((words >> 32).to(tl.int32)) < turn:
        words = tl.load(places, mask=mask, other=stamp, volatile=True)
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def exchange(
    vector, mail, member, team, turn, MAX: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr
):  # fmt: skip
    """The sum of what every member has as this vector of N, or the maximum; the same to the last bit for all of them.

    Each member adds up some columns, those with the numbers of its rows, and tells the others.
    """
    if TEAM == 1:
        result = vector
    else:
        column, other, own = tl.arange(0, N), tl.arange(0, TEAM), member * ROWS + tl.arange(0, ROWS)
        half = mail + turn % 2 * (TEAM + 1) * N
        _send(half + member * N + column, vector, turn, column < N)
        present = (other < team)[:, None] & (own < N)[None, :]
        every = _receive(half + other[:, None] * N + own[None, :], turn, present)
        if MAX:
            total = tl.max(tl.where(present, every, -float("inf")), 0)
        else:
            total = tl.sum(every, 0)
        _send(half + TEAM * N + own, total, turn, own < N)
        result = _receive(half + TEAM * N + column, turn, column < team * ROWS)
    return result
