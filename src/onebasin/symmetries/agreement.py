"""Whether two runs of a network return the same numbers, entry by entry, up to what rounding can explain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

JITTER = 4e-16
"""Relative size of the errors that are put on every weight to find out what rounding does to an output."""


def is_close(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float, noise: Sequence[Tensor] = ()) -> bool:
    """Whether every entry differs by at most `tolerance`, relative to its own scale.

    The scale of an entry is its magnitude. Where an entry is what is left of larger numbers that cancel, `noise` tells their
    magnitude: the outputs with weights that are off by `JITTER`. Infinite entries, integers and what is not a number must be
    equal, integers unless the noise changes them.
    """
    return all(
        bool((_errors(e, f) <= tolerance * _scales(e, n)).all())
        for e, f, n in zip(expected, found, noise or expected, strict=True)
    )


def relative_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference of two lists of outputs, each relative to the largest finite entry."""
    worst = 0.0
    for e, f in zip(expected, found, strict=True):
        errors = _errors(e, f)
        if not errors.numel():
            continue
        scale = float(e.abs().where(e.isfinite(), 0).max()) if _is_inexact(e) else 0.0
        worst = max(worst, float(errors.max()) / scale if scale else float(errors.max()))
    return worst


def amplification(expected: Sequence[Tensor], noise: Sequence[Tensor]) -> float:
    """By how much rounding errors of weights grow until the output: the median entry of the worst tensor."""
    worst = 0.0
    for e, n in zip(expected, noise, strict=True):
        is_known = e.isfinite() & n.isfinite() & (e != 0)
        if _is_inexact(e) and bool(is_known.any()):
            ratios = (e - n)[is_known].abs() / e[is_known].abs()
            worst = max(worst, float(ratios.median()) / JITTER)
    return worst


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _errors(expected: Tensor, found: Tensor) -> Tensor:
    """The difference of each entry; infinite where one of the two is no number, or they are integers, and not equal."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return torch.full((1,) * expected.dim(), torch.inf, device=expected.device)
    if not _is_inexact(expected):
        return torch.where(expected == found, 0.0, torch.inf)
    is_same = (expected == found) | (expected.isnan() & found.isnan())
    return (expected - found).abs().where(~is_same, 0).nan_to_num(torch.inf, torch.inf)


def _scales(expected: Tensor, noise: Tensor) -> Tensor:
    if not _is_inexact(expected):
        return torch.where(expected == noise, 1.0, torch.inf)
    scales = expected.abs().maximum((expected - noise).abs() / JITTER)
    return scales.where(expected.isfinite(), 0).nan_to_num(0.0)
