# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A step of Adam in one launch; imported on CUDA devices alone."""

import math

import triton
import triton.language as tl

BETA1 = tl.constexpr(0.9)
BETA2 = tl.constexpr(0.999)
LOG_BETA1 = tl.constexpr(math.log2(0.9))
LOG_BETA2 = tl.constexpr(math.log2(0.999))
EPS = tl.constexpr(1e-8)


@triton.jit
def step_adam(param, grad, mean, square, count, num, rate, BLOCK: tl.constexpr):
    """Move the parameter and its moments; `count` is the number of this step, from one."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num
    # In float64: one minus a power of 0.999 would lose half of its digits.
    count = tl.load(count).to(tl.float64)
    mean_share = (1.0 - tl.exp2(count * LOG_BETA1)).to(tl.float32)
    square_share = (1.0 - tl.exp2(count * LOG_BETA2)).to(tl.float32)
    g = tl.load(grad + place, mask=inside, other=0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    s = tl.load(square + place, mask=inside, other=0.0)
    p = tl.load(param + place, mask=inside, other=0.0)
    m += (1 - BETA1) * (g - m)
    s = BETA2 * s + (1 - BETA2) * g * g
    tl.store(mean + place, m, mask=inside)
    tl.store(square + place, s, mask=inside)
    tl.store(param + place, p - rate / mean_share * m / (tl.sqrt(s / square_share) + EPS), mask=inside)
