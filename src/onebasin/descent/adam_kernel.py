# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A step of Adam in one launch. Importing this module needs Triton, so `adam` does it inside a function."""

import math

import triton
import triton.language as tl

BETA1 = tl.constexpr(0.9)
BETA2 = tl.constexpr(0.999)
LOG_BETA1 = tl.constexpr(math.log2(0.9))
LOG_BETA2 = tl.constexpr(math.log2(0.999))
EPS = tl.constexpr(1e-8)


@triton.jit
def adam_step(param, grad, exp_avg, exp_avg_sq, num_steps, numel, rate, BLOCK: tl.constexpr):
    """Update a parameter and its moments; `num_steps` points to the number of steps including this one."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    # In float64: one minus a power of 0.999 would lose half of its digits in float32.
    num_steps = tl.load(num_steps).to(tl.float64)
    bias_correction1 = (1.0 - tl.exp2(num_steps * LOG_BETA1)).to(tl.float32)
    bias_correction2 = (1.0 - tl.exp2(num_steps * LOG_BETA2)).to(tl.float32)
    g = tl.load(grad + offsets, mask=mask, other=0.0)
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    s = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)
    p = tl.load(param + offsets, mask=mask, other=0.0)
    m += (1 - BETA1) * (g - m)
    s = BETA2 * s + (1 - BETA2) * g * g
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, s, mask=mask)
    tl.store(param + offsets, p - rate / bias_correction1 * m / (tl.sqrt(s / bias_correction2) + EPS), mask=mask)
