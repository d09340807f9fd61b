"""Scales and matrices that bring the weights of one network closest to those of another, group by group.

Each is the best one while all others stay as they are, from sums over the tensors, which are read one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.matching.closest_matrices import Known, closest_map, closest_rotation, closest_turn
from onebasin.matching.closest_scales import Term, closest_logarithms
from onebasin.matching.problem import Problem
from onebasin.symmetries import Basis, Scale, Symmetry, Transform
from onebasin.symmetries.basis_matrices import pair, turn
from onebasin.symmetries.multiplication import matrix_shape, mixed_tensors, scale_shape, scaled_tensors
from onebasin.tensors.states import State

EQUAL = 1e-10
"""Networks are equal if their squared distance is no more than this share of their squares: rounding leaves less."""
EXACT = 1e-13
"""The same share, of networks between which the rounding of float32 is all that is left."""
_STRETCHED = ("linear", "rotary")
"""The kinds of bases whose matrices are not rotations."""
_NUM_COLUMNS = 2**12
WORST_CONDITION = 1e4
"""Of an invertible matrix that is taken."""


def can_stretch(symmetry: Symmetry, groups: Collection[str]) -> bool:
    """Whether some groups have scales, or matrices that are not rotations."""
    bases = any(basis.group in groups and basis.kind in _STRETCHED for basis in symmetry.bases.values())
    return bases or any(scale.group in groups for scale in symmetry.scales.values())


class ClosestTransforms:
    """Scales and matrices of some groups of a symmetry, in closed form.

    Attributes:
        symmetry: whose they are.
        mixed: multiplies tensors by matrices.
        scaled: multiplies tensors by scales.
    """

    def __init__(self, symmetry: Symmetry):
        self.symmetry, self.mixed, self.scaled = symmetry, mixed_tensors(symmetry), scaled_tensors(symmetry)

    def rotate(
        self,
        problem: Problem,
        current: State,
        bases: Iterable[Basis],
        keys: Sequence[str],
        known: Mapping[str, Known] | None = None,
    ) -> tuple[Transform, dict[str, Known]]:
        """The best rotations of some bases, and the directions in which they are known, of those that are not in all.

        Args:
            problem: with the target.
            current: the source as it has been transformed.
            bases: of any kind but signs.
            keys: the parameters to look at, one at a time.
            known: directions that are known already, and stay.
        """
        matrices, left = {}, {}
        for basis in bases:
            before = (known or {}).get(basis.name)
            products, size = self._multiply(problem, current, basis, keys, before)
            if basis.is_rotary:
                matrices[basis.name] = closest_turn(products)
                continue
            kept = None if before is None else before.made
            matrices[basis.name], found = closest_rotation(products, size, tolerance_of(problem), basis.kind, kept)
            if found is not None:
                left[basis.name] = Known(found, found)
        return Transform(self.symmetry.identity(), {}, matrices, check=False), left

    def _multiply(
        self, problem: Problem, current: State, basis: Basis, keys: Sequence[str], known: Known | None
    ) -> tuple[Tensor, float]:
        """Cross products of the units of a basis, and the most that their singular values could sum up to."""
        shape = matrix_shape(self.symmetry, basis)
        total = torch.zeros(shape, dtype=torch.float64, device=problem.device)
        squares = torch.zeros(2, dtype=torch.float64)
        for key in (key for key in keys if key in basis.places):
            squares += self._add_products(total, _Held({key: problem.target[key]}, {key: current[key]}), basis, known)
        count = total.shape[:-2].numel()
        return total.cpu(), float(squares.prod().sqrt()) / count

    def _add_products(self, total: Tensor, held: _Held, basis: Basis, known: Known | None) -> Tensor:
        """Add cross products, in float64 and a few columns at a time: a table of words is large.

        Returns:
            The sums of squares of target and source.
        """
        squares = torch.zeros(2, dtype=torch.float64)
        parts = (part for is_dual in (False, True) for part in self._parts(held, basis.name, is_dual, known))
        for pairs in parts:
            for theirs, ours in zip(*(part.split(_NUM_COLUMNS, -1) for part in pairs), strict=True):
                wide = theirs.double(), ours.double()
                total += wide[0] @ wide[1].mT
                squares += torch.stack([torch.linalg.vector_norm(part).cpu() for part in wide]).square()
        return squares

    def stretch(
        self, problem: Problem, current: State, groups: Collection[str], keys: Sequence[str], share: float | None = None
    ) -> tuple[Transform, dict[str, Known]]:
        """Scales, and matrices where rotations are not all that is allowed, that bring some parameters closer.

        Args:
            problem: with the target.
            current: the source as it has been transformed.
            groups: whose scales and bases to choose.
            keys: the parameters to look at.
            share: take only what brings the parameters it changes so close that no more than this share of the target's
                sum of squares is left. Without it, where only some of the parameters are looked at, a matrix that makes
                units small would make what reads them large.

        Returns:
            The scales and matrices, and the directions in which bases are known, of those that are not in all.
        """
        symmetry = self.symmetry
        logarithms: dict[str, Tensor] = {}
        matrices: dict[str, Tensor] = {}
        left: dict[str, Known] = {}
        for name, basis in symmetry.bases.items():
            if basis.group not in groups or basis.kind not in _STRETCHED:
                continue
            held = _hold(problem, current, [key for key in keys if key in basis.places])
            known = None
            if basis.is_rotary:
                found = self._stretch_pairs(held, name)
            else:
                found, known = self._stretch_basis(held, basis, tolerance_of(problem))
            moved = held.source if found is None else self.mixed.mix(held.source, {name: found.to(problem.device)})
            if not held.is_close(moved, share):
                continue
            if found is not None:
                matrices[name] = found
            if known is not None:
                left[name] = known
        for name, scale in symmetry.scales.items():
            if scale.group not in groups:
                continue
            held = _hold(problem, current, [key for key in keys if key in scale.powers])
            found = self._stretch_scale(held, scale)
            after = {key: self.scaled.scale(key, value, {name: found}) for key, value in held.source.items()}
            if held.is_close(after, share):
                logarithms[name] = found
        # They were checked when they were solved for.
        return Transform(symmetry.identity(), logarithms, matrices, check=False), left

    def _stretch_scale(self, held: _Held, scale: Scale) -> Tensor:
        shape = scale_shape(self.symmetry, scale)
        terms: dict[float, Term] = {}
        zero = Term(*torch.zeros(2, *shape, dtype=torch.float64))
        for key, ours in held.source.items():
            squares, products = ours.square(), held.target[key] * ours
            both = (self.scaled.sum_by_unit(key, values, scale.name, shape) for values in (squares, products))
            for (power, square), (_, product) in zip(*both, strict=True):
                before = terms.get(power, zero)
                terms[power] = Term(before.square + square, before.product + product)
        return closest_logarithms(terms) if terms else torch.zeros(shape, dtype=torch.float64)

    def _stretch_pairs(self, held: _Held, name: str) -> Tensor:
        """Numbers for pairs of units that bring queries times s and keys over s closest to the target."""
        terms = {}
        for power, is_dual in ((1.0, False), (-1.0, True)):
            square = product = torch.zeros((), dtype=torch.float64)
            for theirs, ours in self._parts(held, name, is_dual):
                square = square + ours.square().sum((-2, -1)).cpu()
                product = product + (theirs * ours).sum((-2, -1)).cpu()
            terms[power] = Term(square, product)
        found = closest_logarithms(terms)
        return turn(torch.zeros_like(found), found.exp())

    def _stretch_basis(self, held: _Held, basis: Basis, tolerance: float) -> tuple[Tensor | None, Known | None]:
        """By what makes the units, by what reads them, and by both: the best matrix, if it brings the networks closer."""
        shape = matrix_shape(self.symmetry, basis)
        products = torch.zeros(2, *shape, dtype=torch.float64)
        squares = torch.zeros(2, *shape, dtype=torch.float64)
        for is_dual in (False, True):
            for theirs, ours in self._parts(held, basis.name, is_dual):
                own = theirs if is_dual else ours
                products[int(is_dual)] += (theirs @ ours.mT).cpu()
                squares[int(is_dual)] += (own @ own.mT).cpu()
        nothing = torch.zeros_like(squares[0])
        matrix, known = closest_map(products.sum(0), squares[0], squares[1], tolerance)
        candidates = [matrix]
        for each in (
            closest_map(products[0], squares[0], nothing, tolerance),
            closest_map(products[1], nothing, squares[1], tolerance),
        ):
            candidates += [each[0]] if each[1] is None else []
        best, found = distance(held.source, held.target, held.target), None
        for each in candidates:
            if not float(torch.linalg.cond(each).max()) < WORST_CONDITION:
                continue
            moved = self.mixed.mix(held.source, {basis.name: each.to(held.device)})
            left = distance(moved, held.target, held.target)
            if left < best:
                best, found = left, each
        return found, known

    def _parts(self, held: _Held, name: str, is_dual: bool, known: Known | None = None) -> list[tuple[Tensor, Tensor]]:
        """What a matrix of a basis, or its dual, multiplies in both networks.

        Where the other of the two multiplies the same tensor, only the directions in which it is known count.
        """
        found = []
        for key in held.source:
            pairs = [part[key] for part in held]
            if known is not None and len({place.is_dual for place in self.symmetry.bases[name].places[key]}) > 1:
                unit = torch.eye(known.made.shape[-1]).to(known.made)
                plans = pair(name, known.made, unit) if is_dual else pair(name, unit, known.read)
                pairs = [self.mixed.mix_with({key: each}, plans)[key] for each in pairs]
            found += zip(*(self.mixed.unfold(key, each, name, is_dual) for each in pairs), strict=True)
        return found

    def grams(self, state: State, basis: Basis, keys: Iterable[str], is_dual: bool) -> Tensor:
        """Inner products of the units of a basis with each other, as its matrix multiplies them, or its dual."""
        total = torch.zeros(matrix_shape(self.symmetry, basis), dtype=torch.float64)
        for key in (key for key in keys if key in basis.places):
            for part in self.mixed.unfold(key, state[key].double(), basis.name, is_dual):
                total += (part @ part.mT).cpu()
        return total


def tolerance_of(problem: Problem) -> float:
    """The share of squares that rounding may be all of, in the type that a problem is computed in."""
    return torch.finfo(problem.dtype).eps ** 0.75


class _Held(NamedTuple):
    """Some parameters of the target and of the source, in float64."""

    target: dict[str, Tensor]
    source: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return next(iter(self.source.values())).device

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


def distance(state: Mapping[str, Tensor], target: Mapping[str, Tensor], keys: Iterable[str]) -> float:
    """The sum of the squared differences of some tensors."""
    return sum(float((state[key] - target[key]).square().sum(dtype=torch.float64)) for key in keys)
