"""Which units of two networks belong together, where units may be scaled, change their signs or be mixed.

A pair counts as much as the best element of its kind brings it together: two units by the scale and the sign that bring one
closest to the other, two heads by the matrix that does so. The pairs are then chosen by assignment.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.matching.closest_matrices import closest_rotation, closest_turn, complex_sum, explained_by_maps
from onebasin.matching.closest_scales import Term, scaled_scores
from onebasin.matching.closest_transforms import ClosestTransforms
from onebasin.matching.problem import Problem
from onebasin.matching.scores import innermost_axes, member_blocks, reduce_to, score
from onebasin.relaxation.hardening import harden
from onebasin.relaxation.plans import pair_index, plan_shape
from onebasin.symmetries import Basis, Group, Permutation, Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.tensors.states import State


def sole_bases(symmetry: Symmetry) -> dict[str, Basis]:
    """The bases of groups that have no other basis, by name."""
    count = Counter(basis.group for basis in symmetry.bases.values())
    return {name: basis for name, basis in symmetry.bases.items() if count[basis.group] == 1}


class CrossProducts:
    """Cross products of the units of a group that may be rotated, target times source, in the shape of its plan."""

    def __init__(self, symmetry: Symmetry, basis: Basis, total: Tensor):
        self.symmetry, self.basis = symmetry, basis
        self.total = total.double().cpu()
        if basis.kind == "centred":
            self.total = self.total - self.total.mean(-1, keepdim=True)
            self.total = self.total - self.total.mean(-2, keepdim=True)

    def scores(self) -> Tensor:
        """For `harden`: each pair of members counts as much as its best rotation; inside, nothing is permuted.

        Units that may change their signs are permuted, and each pair of them counts as much as its better sign.
        """
        if self.basis.kind == "signed":
            return self.total.abs()
        if not self.symmetry.groups[self.basis.group].parents:  # there is one member, and nothing to compare it with
            return torch.eye(self.total.shape[-1], dtype=torch.float64)
        if self.basis.is_rotary:
            return self._spread(torch.hypot(*complex_sum(self.total)))
        return self._spread(torch.linalg.svdvals(self.total).sum(-1))

    def fitted_scores(self, made: Tensor, read: Tensor) -> Tensor:
        """The same, where each pair of members counts as much as its best invertible matrix.

        Args:
            made: cross products of source units with each other, in what makes them, (*parent sizes, size, size).
            read: the same of target units, in what reads them.
        """
        parents = self.symmetry.groups[self.basis.group].parents
        made, read = _pair_up(self.symmetry, parents, made, 0), _pair_up(self.symmetry, parents, read, 1)
        if not self.basis.is_rotary:
            return self._spread(explained_by_maps(self.total, made, read))
        sizes = (made + read).diagonal(dim1=-2, dim2=-1).sum(-1)
        squares = sum((part.square() for part in complex_sum(self.total)), torch.zeros(()))
        return self._spread(torch.where(sizes > 0, squares / sizes, 0.0) / 2)

    def _spread(self, values: Tensor) -> Tensor:
        size = self.total.shape[-1]
        return (values / size)[..., None, None] * torch.eye(size, dtype=torch.float64)

    def rotations(self, permutation: Permutation) -> Tensor:
        """The best rotation of each member onto the member of the target that it was paired with."""
        group = self.symmetry.groups[self.basis.group]
        chosen = self.total[pair_index(permutation, group)] if group.parents else self.total
        if self.basis.kind == "signed":
            paired = chosen.gather(-1, permutation[self.basis.group].unsqueeze(-1)).squeeze(-1)
            return torch.where(paired < 0, -1.0, 1.0).double()
        if self.basis.is_rotary:
            return closest_turn(chosen)
        return closest_rotation(chosen, float(chosen.norm()), 0.0, self.basis.kind)[0]


def _pair_up(symmetry: Symmetry, parents: Sequence[str], values: Tensor, offset: int) -> Tensor:
    """Numbers of source members (offset 0) or target members (1), to broadcast to those of all pairs of them."""
    for place in reversed(range(len(parents))):
        if parents[place] in symmetry.groups:
            values = values.unsqueeze(place + offset)
    return values


class UnitPairs:
    """Chooses which units of the source belong to which of the target.

    Args:
        closest: the scales and matrices of the symmetry.
    """

    def __init__(self, closest: ClosestTransforms):
        self.closest, self.symmetry = closest, closest.symmetry
        self._bases = {basis.group: basis for basis in sole_bases(self.symmetry).values()}

    def find(self, problem: Problem, current: State, groups: list[Group], keys: list[str], fitted: bool) -> Transform:
        """The best permutation of joint groups, with the signs of their units.

        Args:
            problem: with the target.
            current: the source as it has been transformed.
            groups: decided together.
            keys: the tensors to compare.
            fitted: pair units by their best scales, and members of families by their best invertible matrices; if not, as
                they are, and by their best rotations.
        """
        scores: dict[str, Tensor] = {}
        signs: dict[str, Tensor] = {}
        plain = []
        for group in groups:
            basis = self._bases.get(group.name)
            if basis is not None and basis.kind != "signed" and not group.parents:
                scores[group.name] = torch.eye(group.size, dtype=torch.float64)
            elif (basis is not None and basis.kind == "signed") or (fitted and self._scales(group)):
                units = _Units(self.closest, problem, current, group, groups, keys, basis)
                scores[group.name], signs[group.name] = units.fitted_scores() if fitted else units.scores()
            else:
                plain.append(group)
        scores |= self._score_plain(problem, current, groups, plain, keys, fitted) if plain else {}
        permutation = harden(self.symmetry, {name: value.cpu() for name, value in scores.items()}, groups)
        matrices = {}
        for name, is_flipped in signs.items():
            basis = self._bases.get(name)
            if basis is not None:
                chosen = is_flipped.cpu()[pair_index(permutation, self.symmetry.groups[name])]
                paired = chosen.gather(-1, permutation[name].unsqueeze(-1)).squeeze(-1)
                matrices[basis.name] = torch.where(paired, -1.0, 1.0).double()
        return Transform(permutation, {}, matrices, check=False)

    def bases_of(self, groups: Iterable[Group]) -> list[Basis]:
        """The bases of some groups that are matrices."""
        found = (self._bases.get(group.name) for group in groups)
        return [basis for basis in found if basis is not None and basis.kind != "signed"]

    def can_fit(self, groups: list[Group]) -> bool:
        """Whether `fitted` makes a difference to some groups."""
        families = {group.name for group in groups if group.parents}
        kinds = {basis.kind for name, basis in self._bases.items() if name in families}
        return self.have_scales(groups) or bool(kinds & {"linear", "rotary"})

    def have_scales(self, groups: Iterable[Group]) -> bool:
        """Whether units of some groups can be scaled."""
        return any(self._scales(group) for group in groups)

    def _scales(self, group: Group) -> list[str]:
        return [name for name, scale in self.symmetry.scales.items() if scale.group == group.name]

    def _score_plain(
        self, problem: Problem, current: State, groups: list[Group], plain: list[Group], keys: list[str], fitted: bool
    ) -> dict[str, Tensor]:
        """Of groups whose units are permuted, or whose members are paired whatever their bases are."""
        bases = [self._bases[group.name] for group in plain if group.name in self._bases]
        dtype = torch.float64 if bases else None
        found, _ = score(problem, current, groups, keys, dtype)
        scores = {group.name: found[group.name] for group in plain}
        for basis in bases:
            total = scores[basis.group]
            if others := [k for k in keys if k not in basis.places and basis.group in names(self.symmetry.layouts[k])]:
                # Gains of norms, for example: a matrix does not change them.
                total = total - score(problem, current, groups, others, dtype)[0][basis.group]
            products = CrossProducts(self.symmetry, basis, total)
            if fitted and basis.kind in ("linear", "rotary"):
                made = self.closest.grams(current, basis, keys, is_dual=False)
                scores[basis.group] = products.fitted_scores(made, self.closest.grams(problem.target, basis, keys, True))
            else:
                scores[basis.group] = products.scores()
        return scores


_Class = tuple[float, ...]
"""How entries of tensors change with a unit: the exponents of its scales, and whether the sign changes (1) or not (0)."""


class _Units:
    """Inner products of units that may be scaled and change their signs, apart by how these enter the tensors.

    Attributes:
        products: for each class of entries, in the shape of a plan.
        squares: sums of squares of source units, to broadcast to that.
        scales: by whose exponents classes are told apart.
    """

    def __init__(
        self,
        closest: ClosestTransforms,
        problem: Problem,
        current: State,
        group: Group,
        groups: list[Group],
        keys: Sequence[str],
        basis: Basis | None,
    ):
        symmetry = closest.symmetry
        self.scales = [name for name, scale in symmetry.scales.items() if scale.group == group.name]
        self.has_signs = basis is not None
        self.products: dict[_Class, Tensor] = {}
        self.squares: dict[_Class, Tensor] = {}
        masks: dict[_Class, dict[str, Tensor | None]] = {}
        for key in (key for key in keys if group.name in names(symmetry.layouts[key])):
            exponents = closest.scaled.exponents(key)
            wanted = [exponents.get(name, torch.zeros(())) for name in self.scales]
            parities = closest.mixed.parities(key) if basis is not None else {}
            wanted.append(parities.get("" if basis is None else basis.name, torch.zeros(())) % 2)
            for kind, mask in _split(wanted):
                masks.setdefault(kind, {})[key] = mask
        for kind, some in masks.items():
            masked = current.map(functools.partial(_mask, some)) if any(m is not None for m in some.values()) else current
            self.products[kind] = score(problem, masked, groups, list(some))[0][group.name]
            self.squares[kind] = _sum_squares(symmetry, masked, group, groups, some)
        if not masks:
            nothing = torch.zeros(plan_shape(symmetry, group), dtype=problem.dtype, device=problem.device)
            self.products[(0.0,) * (len(self.scales) + 1)] = self.squares[(0.0,) * (len(self.scales) + 1)] = nothing

    def scores(self) -> tuple[Tensor, Tensor]:
        """Of units as they are, and which of them are better with the other sign."""
        parts = [torch.zeros(()), torch.zeros(())]
        for kind, products in self.products.items():
            parts[int(kind[-1])] = parts[int(kind[-1])] + products
        even, odd = parts
        total = even + odd.abs()
        return total, (odd < 0).expand_as(total)

    def fitted_scores(self) -> tuple[Tensor, Tensor]:
        """Of units at their best scales, and which of them are better with the other sign."""
        total = self._fit(1)
        if not self.has_signs:
            return total, torch.zeros_like(total, dtype=torch.bool)
        flipped = self._fit(-1)
        return torch.maximum(total, flipped), flipped > total

    def _fit(self, sign: int) -> Tensor:
        terms: dict[str, dict[float, Term]] = {name: {} for name in self.scales}
        total: Tensor | None = None
        for kind, products in self.products.items():
            products = sign * products if kind[-1] else products
            # Entries that several scales of a unit multiply, which is rare, count for the first.
            name = next((name for name, power in zip(self.scales, kind, strict=False) if power), None)
            if name is None:
                each = products - self.squares[kind] / 2
                total = each if total is None else total + each
                continue
            power = next(power for power in kind if power)
            before = terms[name].get(power, Term(torch.zeros(()), torch.zeros(())))
            terms[name][power] = Term(before.square + self.squares[kind], before.product + products)
        for each in (scaled_scores(some) for some in terms.values() if some):
            total = each if total is None else total + each
        assert total is not None
        return total


def _split(exponents: Sequence[Tensor]) -> list[tuple[_Class, Tensor | None]]:
    """The classes of entries that a tensor has, with masks to broadcast if there are several."""
    patterns = torch.stack(torch.broadcast_tensors(*exponents), -1)
    kinds = patterns.reshape(-1, patterns.shape[-1]).unique(dim=0)
    return [(tuple(kind.tolist()), (patterns == kind).all(-1) if len(kinds) > 1 else None) for kind in kinds]


def _mask(masks: Mapping[str, Tensor | None], key: str, value: Tensor) -> Tensor:
    mask = masks.get(key)
    return value if mask is None else value * mask.to(value)


def _sum_squares(symmetry: Symmetry, state: State, group: Group, groups: list[Group], keys: Collection[str]) -> Tensor:
    """Of the source units of a group, over some tensors, to broadcast to a plan."""
    members = {each.name: each for each in groups}
    total = torch.zeros((), dtype=state.dtype, device=state.device)
    for key in keys:
        for block in member_blocks(symmetry.layouts[key], members, state[key]):
            for axis, chain in innermost_axes(members, block).items():
                if block.labels[axis] == group.name:
                    found = reduce_to(block.tensors[0].square(), chain)
                    total = total + _pair_up(symmetry, (*group.parents, group.name), found, 0)
    return total
