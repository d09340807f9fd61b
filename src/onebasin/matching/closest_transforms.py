"""Scales and invertible matrices that bring the weights of one network closest to those of another, group by group.

For each power p with which a scale s enters the tensors, the squared distance has the terms a s^2p - 2 b s^p: a problem in
one number per unit, solved by Newton's method. An invertible matrix has a least-squares solution for what it multiplies, and
one for what its dual multiplies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.matching.problem import Problem
from onebasin.symmetries import Basis, Scale, Symmetry, Transform
from onebasin.symmetries.basis_matrices import MixedTensors, turn
from onebasin.symmetries.multiplication import mixed_tensors, scale_shape, scaled_tensors
from onebasin.symmetries.scales import ScaledTensors
from onebasin.tensors.states import State

EQUAL = 1e-10
"""Networks are equal if their squared distance is no more than this share of their squares: rounding leaves less."""
_STRETCHED = ("linear", "rotary")
"""The kinds of bases whose matrices are not rotations."""
_NUM_NEWTON = 30
_LIMIT = 3.0
"""The largest logarithm of a scale: where units point in opposite directions, the smaller the closer, without end."""


def can_stretch(symmetry: Symmetry, groups: Collection[str]) -> bool:
    """Whether some groups have scales, or matrices that are not rotations."""
    bases = any(basis.group in groups and basis.kind in _STRETCHED for basis in symmetry.bases.values())
    return bases or any(scale.group in groups for scale in symmetry.scales.values())


def stretch(
    problem: Problem, current: State, groups: Collection[str], keys: Sequence[str], share: float | None = None
) -> Transform:
    """Scales, and matrices where rotations are not all that is allowed, that bring some parameters closer to the target's.

    Args:
        problem: with the target.
        current: the source as it has been transformed.
        groups: whose scales and bases to choose.
        keys: the parameters to look at.
        share: take only what brings the parameters it changes so close that no more than this share of the target's sum of
            squares is left. Without it, where only some of the parameters are looked at, a matrix that makes units small
            would make what reads them large.
    """
    symmetry = problem.symmetry
    mixed, scaled = mixed_tensors(symmetry), scaled_tensors(symmetry)
    logarithms: dict[str, Tensor] = {}
    matrices: dict[str, Tensor] = {}
    for name, basis in symmetry.bases.items():
        if basis.group not in groups or basis.kind not in _STRETCHED:
            continue
        held = _hold(problem, current, [key for key in keys if key in basis.places])
        found = _stretch_pairs(mixed, held, name) if basis.is_rotary else _stretch_basis(mixed, held, basis)
        if found is not None and held.is_close(mixed.mix(held.source, {name: found.to(problem.device)}), share):
            matrices[name] = found
    for name, scale in symmetry.scales.items():
        if scale.group not in groups:
            continue
        held = _hold(problem, current, [key for key in keys if key in scale.powers])
        found = _stretch_scale(scaled, held, scale, scale_shape(symmetry, scale))
        after = {key: scaled.scale(key, value, {name: found}) for key, value in held.source.items()}
        if held.is_close(after, share):
            logarithms[name] = found
    return Transform(symmetry.identity(), logarithms, matrices, check=False)  # they were checked when they were solved for


class _Held(NamedTuple):
    """Some parameters of the target and of the source, in float64."""

    target: dict[str, Tensor]
    source: dict[str, Tensor]

    def is_close(self, after: Mapping[str, Tensor], share: float | None) -> bool:
        """Whether the target differs from these tensors by no more than a share of its squares; True without a share."""
        if share is None:
            return True
        return distance(after, self.target, self.target) <= share * sum(
            float(v.square().sum()) for v in self.target.values()
        )


def _hold(problem: Problem, current: State, keys: Sequence[str]) -> _Held:
    target, source = ({key: state[key].double() for key in keys} for state in (problem.target, current))
    return _Held(target, source)


class Term(NamedTuple):
    """How the distance depends on one power of a scale: square * s^2p - 2 * product * s^p, for each unit."""

    square: Tensor
    product: Tensor


def closest_logarithms(terms: Mapping[float, Term], limit: float = _LIMIT) -> Tensor:
    """The logarithms of scales at which a distance is smallest, by Newton's method, from one.

    Steps are bounded. Numbers that do not lower the distance are left at one.

    Args:
        terms: for each power of the scale the sums over what it multiplies.
        limit: of the logarithms.
    """

    def evaluate(t: Tensor, order: int) -> Tensor:
        """The distance but for a constant, or a derivative of it."""
        return sum(
            (
                (2 * p) ** order * term.square * (2 * p * t).exp() - 2 * p**order * term.product * (p * t).exp()
                for p, term in terms.items()
            ),
            torch.zeros_like(t),
        )

    t = torch.zeros_like(next(iter(terms.values())).square)
    for _ in range(_NUM_NEWTON):
        slope, curvature = evaluate(t, 1), evaluate(t, 2)
        step = torch.where(curvature > 0, slope / curvature, slope.sign() * 0.1)
        t = (t - step.nan_to_num().clamp(-0.5, 0.5)).clamp(-limit, limit)
    return torch.where(evaluate(t, 0) < evaluate(torch.zeros_like(t), 0), t, torch.zeros_like(t))


def _stretch_scale(scaled: ScaledTensors, held: _Held, scale: Scale, shape: Sequence[int]) -> Tensor:
    terms: dict[float, Term] = {}
    zero = Term(*torch.zeros(2, *shape, dtype=torch.float64))
    for key, ours in held.source.items():
        squares, products = ours.square(), held.target[key] * ours
        both = (scaled.sum_by_unit(key, values, scale.name, shape) for values in (squares, products))
        for (power, square), (_, product) in zip(*both, strict=True):
            before = terms.get(power, zero)
            terms[power] = Term(before.square + square, before.product + product)
    return closest_logarithms(terms) if terms else torch.zeros(tuple(shape), dtype=torch.float64)


def _stretch_pairs(mixed: MixedTensors, held: _Held, name: str) -> Tensor:
    """Numbers for pairs of units that bring queries times s and keys over s closest to the target."""
    terms = {}
    for power, is_dual in ((1.0, False), (-1.0, True)):
        square = product = torch.zeros((), dtype=torch.float64)
        for theirs, ours in _parts(mixed, held, name, is_dual):
            square = square + ours.square().sum((-2, -1)).cpu()
            product = product + (theirs * ours).sum((-2, -1)).cpu()
        terms[power] = Term(square, product)
    found = closest_logarithms(terms)
    return turn(torch.zeros_like(found), found.exp())


def _stretch_basis(mixed: MixedTensors, held: _Held, basis: Basis) -> Tensor | None:
    """What makes the units and what reads them each have a best matrix: the better one, if it brings the networks closer."""
    best, found = distance(held.source, held.target, held.target), None
    for is_dual in (False, True):
        matrix = _least_squares(mixed, held, basis.name, is_dual)
        if matrix is None:
            continue
        matrix = torch.linalg.inv(matrix).mT if is_dual else matrix
        device = next(iter(held.source.values())).device
        left = distance(mixed.mix(held.source, {basis.name: matrix.to(device)}), held.target, held.target)
        if left < best:
            best, found = left, matrix
    return found


def _least_squares(mixed: MixedTensors, held: _Held, name: str, is_dual: bool) -> Tensor | None:
    """The matrix that brings what it multiplies of the source closest to the target; None if it is not well determined."""
    cross = square = None
    for theirs, ours in _parts(mixed, held, name, is_dual):
        cross = theirs @ ours.mT + (0 if cross is None else cross)
        square = ours @ ours.mT + (0 if square is None else square)
    if cross is None or square is None or not float(torch.linalg.cond(square).max()) < 1e8:
        return None
    matrix = torch.linalg.solve(square, cross.mT).mT.cpu()
    return matrix if float(torch.linalg.cond(matrix).max()) < 1e4 else None


def _parts(mixed: MixedTensors, held: _Held, name: str, is_dual: bool) -> list[tuple[Tensor, Tensor]]:
    """What a matrix of a basis, or its dual, multiplies in both networks."""
    return [
        pair
        for key in held.source
        for pair in zip(*(mixed.unfold(key, part[key], name, is_dual) for part in held), strict=True)
    ]


def distance(state: Mapping[str, Tensor], target: Mapping[str, Tensor], keys: Iterable[str]) -> float:
    """The sum of the squared differences of some tensors."""
    return sum(float((state[key] - target[key]).square().sum(dtype=torch.float64)) for key in keys)
