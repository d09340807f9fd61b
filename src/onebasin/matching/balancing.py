"""The smallest weights that compute the same: scales and bases chosen so that what makes units and what reads them balance.

Of all positive scales and invertible matrices that leave a function alone, one makes the sum of squares of the parameters
smallest. A rotation does not change it. The sum is convex in the logarithms of the scales, and for a matrix M with the Gram
matrices P of what it multiplies and R of what its dual multiplies, M^T M is the geometric mean of the inverse of P and R.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from onebasin.matching.closest_scales import Term, closest_logarithms
from onebasin.symmetries import Basis, Scale, Symmetry, Transform
from onebasin.symmetries.basis_matrices import MixedTensors, turn
from onebasin.symmetries.multiplication import mixed_tensors, scale_shape, scaled_tensors
from onebasin.symmetries.scales import ScaledTensors
from onebasin.tensors.states import State

_MAX_ROUNDS = 50
_CLOSE = 1e-12


def balance(symmetry: Symmetry, state: State, keys: Collection[str]) -> Transform:
    """The transform of a state after which the sum of squares of some parameters is smallest.

    Scales that enter these parameters with powers of one sign alone have no best value, and stay as they are; so do bases of
    units that are zero in some direction.

    Args:
        symmetry: with scales and bases.
        state: in float64.
        keys: the parameters, each tied one once.
    """
    scaled, mixed = scaled_tensors(symmetry), mixed_tensors(symmetry)
    total = Transform(symmetry.identity(), {})
    size = _sum_squares(state, keys)
    for _ in range(_MAX_ROUNDS):
        current = total.apply(state)
        for scale in symmetry.scales.values():
            found = _balance_scale(symmetry, scaled, scale, current, keys)
            if found is not None:
                update = Transform(symmetry.identity(), {scale.name: found})
                total, current = update @ total, update.apply(current)
        for basis in symmetry.bases.values():
            found = _balance_basis(mixed, basis, current, keys)
            if found is not None:
                update = Transform(symmetry.identity(), {}, {basis.name: found})
                total, current = update @ total, update.apply(current)
        before, size = size, _sum_squares(current, keys)
        if size > before * (1 - _CLOSE):
            break
    return total


def _sum_squares(state: State, keys: Collection[str]) -> float:
    return sum(float(state[key].double().square().sum()) for key in keys)


def _balance_scale(
    symmetry: Symmetry, scaled: ScaledTensors, scale: Scale, state: State, keys: Collection[str]
) -> Tensor | None:
    """The logarithms at which sum_p E_p s^(2 p), the distance from zero, is smallest; None if there are no such numbers."""
    energies: dict[float, Tensor] = {}
    for key in (scale.powers.keys() - scale.offsets.keys()) & set(keys):
        for exponent, energy in scaled.sum_by_unit(
            key, state[key].double().square(), scale.name, scale_shape(symmetry, scale)
        ):
            energies[exponent] = energies.get(exponent, torch.zeros(())) + energy
    if not energies or min(energies) > 0 or max(energies) < 0:
        return None
    can_grow = torch.stack([energy > 0 for exponent, energy in energies.items() if exponent < 0]).any(0)
    can_shrink = torch.stack([energy > 0 for exponent, energy in energies.items() if exponent > 0]).any(0)
    terms = {exponent: Term(energy, torch.zeros_like(energy)) for exponent, energy in energies.items()}
    return torch.where(can_grow & can_shrink, closest_logarithms(terms, limit=math.inf), 0.0)


def _balance_basis(mixed: MixedTensors, basis: Basis, state: State, keys: Collection[str]) -> Tensor | None:
    """The best matrices of a basis that may change lengths; None for others."""
    if basis.kind not in ("linear", "rotary"):
        return None
    grams = [_gram(mixed, basis, state, keys, is_dual) for is_dual in (False, True)]
    if any(gram is None for gram in grams):
        return None
    made, read = grams
    assert made is not None
    assert read is not None
    if basis.is_rotary:
        ratio = read.diagonal(dim1=-2, dim2=-1).sum(-1) / made.diagonal(dim1=-2, dim2=-1).sum(-1)
        return turn(torch.zeros_like(ratio), ratio**0.25) if bool(((ratio > 0) & ratio.isfinite()).all()) else None
    if not all(float(torch.linalg.cond(gram).max()) < 1 / _CLOSE for gram in (made, read)):
        return None
    root, inverse = _power(made, 0.5), _power(made, -0.5)
    return _power(inverse @ _power(root @ read @ root, 0.5) @ inverse, 0.5)


def _gram(mixed: MixedTensors, basis: Basis, state: State, keys: Collection[str], is_dual: bool) -> Tensor | None:
    parts = [
        part @ part.mT
        for key in basis.places
        if key in keys
        for part in mixed.unfold(key, state[key].double(), basis.name, is_dual)
    ]
    return sum(parts[1:], parts[0]).cpu() if parts else None


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values**exponent).unsqueeze(-2)) @ vectors.mT
