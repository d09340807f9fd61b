"""Positive scales that bring the units of one network closest to those of another.

For each power p with which a scale s enters the tensors, the squared distance has the terms a s^2p - 2 b s^p: a problem in
one number per unit, solved by Newton's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_NUM_NEWTON = 30
_LIMIT = 3.0
"""The largest logarithm of a scale: where units point in opposite directions, the smaller the closer, without end."""
_PAIRS_AT_A_TIME = 2**20


class Term(NamedTuple):
    """How the distance depends on one power of a scale: square * s^2p - 2 * product * s^p, for each unit."""

    square: Tensor
    product: Tensor


def closest_logarithms(terms: Mapping[float, Term], limit: float = _LIMIT) -> Tensor:
    """The logarithms of scales at which a distance is smallest, by Newton's method.

    Steps are bounded. Numbers that do not lower the distance are left at one.

    Args:
        terms: for each power of the scale the sums over what it multiplies.
        limit: of the logarithms.
    """
    t = _estimate_logarithms(terms, limit)
    for _ in range(_NUM_NEWTON):
        slope, curvature = _evaluate(terms, t, 1), _evaluate(terms, t, 2)
        step = torch.where(curvature > 0, slope / curvature, slope.sign() * 0.1)
        t = (t - step.nan_to_num().clamp(-0.5, 0.5)).clamp(-limit, limit)
    return torch.where(_evaluate(terms, t, 0) < _evaluate(terms, torch.zeros_like(t), 0), t, torch.zeros_like(t))


def _evaluate(terms: Mapping[float, Term], t: Tensor, order: int) -> Tensor:
    """The distance but for a constant, or a derivative of it."""
    found = torch.zeros_like(t)
    for p, term in terms.items():
        power = (p * t).exp()
        found = found + (2 * p) ** order * term.square * power.square() - 2 * p**order * term.product * power
    return found


def _estimate_logarithms(terms: Mapping[float, Term], limit: float) -> Tensor:
    """The mean of the logarithms that are best for each power alone, weighted by how much the distance depends on them."""
    smallest = torch.finfo(next(iter(terms.values())).product.dtype).tiny
    weighted = weights = torch.zeros(())
    for p, term in terms.items():
        product, square = term.product.clamp(min=0), term.square.clamp(min=smallest)
        ratio = product / square
        weight = p**2 * ratio * product
        weighted, weights = weighted + weight * ratio.clamp(min=smallest).log() / p, weights + weight
    return (weighted / weights.clamp(min=smallest)).clamp(-limit, limit)


def scaled_scores(terms: Mapping[float, Term]) -> Tensor:
    """Minus half the distance of pairs of units, but for a constant of each target unit, at about their best scales.

    Where one power is all there is, or the source is a scaled copy of the target, the scale is the best one.

    Args:
        terms: for each power of the scale the sums over what it multiplies, (*, n, n) for all pairs.
    """
    shape = torch.broadcast_shapes(*(term.product.shape for term in terms.values()))
    count = max(1, _PAIRS_AT_A_TIME // shape[-1])
    found = []
    for start in range(0, shape[-2], count):
        rows = {p: Term(term.square, term.product[..., start : start + count, :]) for p, term in terms.items()}
        found.append(-_evaluate(rows, _estimate_logarithms(rows, _LIMIT), 0) / 2)
    return torch.cat(found, -2)
