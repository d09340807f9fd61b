"""Rotations of units that bring two networks together: the best one in closed form, for one group at a time.

Of all orthogonal matrices M, U V^T raises the inner product of target and M source most, where U and V are the singular
vectors of the cross products of their units (Procrustes). The sum of the singular values is what it reaches: by that members
of a family, such as heads, are paired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.matching.problem import Problem
from onebasin.matching.scores import inner_product, order_from_anchors, score, touched_keys
from onebasin.relaxation.hardening import harden, joint_groups
from onebasin.symmetries import Basis, Group, Permutation, Symmetry, Transform
from onebasin.symmetries.basis_matrices import MixedTensors, complement_of_ones, turn
from onebasin.symmetries.layout import names
from onebasin.symmetries.transform import mixed_tensors
from onebasin.tensors.states import State

_NUM_NEWTON = 20


def sole_bases(symmetry: Symmetry) -> dict[str, Basis]:
    """The bases of groups that have no other basis, by name."""
    count = Counter(basis.group for basis in symmetry.bases.values())
    return {name: basis for name, basis in symmetry.bases.items() if count[basis.group] == 1}


def with_pairs(symmetry: Symmetry) -> Symmetry:
    """A symmetry in which two units that a rotary embedding turns together are a group too, which is never permuted."""
    pairs = [basis for basis in symmetry.bases.values() if basis.is_rotary]
    return replace(symmetry, groups={**symmetry.groups, **{b.group: Group(b.group, 2, b.parents) for b in pairs}})


def without_pairs(symmetry: Symmetry, found: Transform) -> Transform:
    """A transform of `with_pairs(symmetry)` as one of the symmetry."""
    indices = {name: found.permutation[name] for name in symmetry.groups}
    return Transform(Permutation(symmetry, indices, check=False), found.logarithms, found.matrices)


class CrossProducts:
    """Cross products of the units of a group that may be rotated, target times source, in the shape of its plan."""

    def __init__(self, symmetry: Symmetry, basis: Basis, total: Tensor):
        self.symmetry, self.basis = symmetry, basis
        self.total = total.double().cpu()
        if basis.kind == "centred":
            inside = complement_of_ones(total.shape[-1])
            self.total = inside @ (inside.mT @ self.total @ inside) @ inside.mT

    def scores(self) -> Tensor:
        """For `harden`: each pair of members counts as much as its best rotation; inside, nothing is permuted.

        Units that may change their signs are permuted, and each pair of them counts as much as its better sign.
        """
        if self.basis.kind == "signed":
            return self.total.abs()
        size = self.total.shape[-1]
        if self.basis.is_rotary:
            values = torch.hypot(*_complex_sum(self.total)) / size
        else:
            values = torch.linalg.svdvals(self.total).sum(-1) / size
        return values[..., None, None] * torch.eye(size, dtype=torch.float64)

    def rotations(self, permutation: Permutation) -> Tensor:
        """The best rotation of each member onto the member of the target that it was paired with."""
        group = self.symmetry.groups[self.basis.group]
        chosen = self.total
        if group.parents:
            grid = torch.meshgrid(*(torch.arange(self.symmetry.sizes[p]) for p in group.parents), indexing="ij")
            index: list[Tensor] = []
            for parent, target, source in zip(group.parents, grid, permutation.parent_sources(group), strict=True):
                index += [target, source] if parent in self.symmetry.groups else [target]
            chosen = self.total[tuple(index)]
        if self.basis.kind == "signed":
            paired = chosen.gather(-1, permutation[self.basis.group].unsqueeze(-1)).squeeze(-1)
            return torch.where(paired < 0, -1.0, 1.0).double()
        if self.basis.is_rotary:
            real, imaginary = _complex_sum(chosen)
            return turn(torch.atan2(imaginary, real), torch.ones_like(real))
        if self.basis.kind != "centred":
            return _rotation(chosen)
        inside = complement_of_ones(chosen.shape[-1])
        return inside @ _rotation(inside.mT @ chosen @ inside) @ inside.mT + 1 / chosen.shape[-1]


def _complex_sum(products: Tensor) -> tuple[Tensor, Tensor]:
    """Cross products of two pairs of units as complex numbers: the sum of target times the conjugate of source."""
    return products[..., 0, 0] + products[..., 1, 1], products[..., 1, 0] - products[..., 0, 1]


def _rotation(products: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(products)
    return left @ right


def sweep_with_bases(
    problem: Problem, max_sweeps: int, start: Transform | None = None, only: Collection[str] | None = None
) -> tuple[Transform, bool]:
    """Raise the inner product of the weights by permutations and rotations.

    In the first sweep a group is judged by the tensors whose other groups have been decided, where there are any.

    Args:
        problem: what to match.
        max_sweeps: the most sweeps to make.
        start: what to begin with; the identity if None.
        only: decide these groups, and those nested with them; all if None.

    Returns:
        What to do to the source, and whether the last sweep changed nothing.
    """
    given, symmetry = problem.symmetry, with_pairs(problem.symmetry)
    problem = replace(problem, symmetry=symmetry)
    bases = sole_bases(symmetry)
    sets = [groups for groups in joint_groups(symmetry) if only is None or any(g.name in only for g in groups)]
    touched = [touched_keys(symmetry, problem.keys, groups) for groups in sets]
    total = Transform(symmetry.identity(), {})
    if start is not None:
        indices = {**symmetry.identity().indices, **start.permutation.indices}
        total = Transform(Permutation(symmetry, indices, check=False), start.logarithms, start.matrices)
    current = total.apply(problem.source.load())
    decided = symmetry.groups.keys() - {group.name for groups in sets for group in groups}
    num_moved = 0
    for number_of_sweep in range(max_sweeps):
        num_moved = 0
        for done, number in enumerate(order_from_anchors(symmetry, sets, touched)):
            problem.progress(f"sweep {number_of_sweep + 1}", done, len(sets))
            groups, keys = sets[number], touched[number]
            judged = _trusted(symmetry, keys, decided | {g.name for g in groups}) if number_of_sweep == 0 else keys
            scores, _ = score(problem, current, groups, judged)
            decided |= {group.name for group in groups}
            mine = {n: b for n, b in bases.items() if b.group in scores}
            signed = {
                basis.group: score(problem, current, groups, [key for key in judged if key in basis.places])[0][basis.group]
                for basis in mine.values()
                if basis.kind == "signed"
            }
            update = _decide(symmetry, mine, scores, signed)
            after = update.apply(current)
            before = inner_product(current, problem.target, keys)
            if inner_product(after, problem.target, keys) > before + 1e-11 * abs(before) or number_of_sweep == 0:
                num_moved, total, current = num_moved + 1, update @ total, after
        inner = inner_product(current, problem.target, problem.keys)
        problem.report({"sweep": number_of_sweep, "moved": num_moved, "inner": inner})
        if not num_moved:
            break
    members = {group.name for groups in sets for group in groups}
    return without_pairs(given, _stretch(problem, current, members) @ total), num_moved == 0


def _stretch(problem: Problem, current: State, groups: Collection[str]) -> Transform:
    """Invertible matrices where rotations are not all that is allowed, if they bring the networks closer.

    What makes the units and what reads them each have a best matrix, by least squares; the better of the two is taken.
    """
    symmetry = problem.symmetry
    mixed = mixed_tensors(symmetry)
    found: dict[str, Tensor] = {}
    for name, basis in symmetry.bases.items():
        keys = [key for key in problem.keys if key in basis.places]
        if basis.is_rotary and basis.group in groups:
            found[name] = _lengthen(mixed, problem.target, current, name, keys)
        if basis.kind != "linear" or basis.group not in groups:
            continue
        best = _distance(current, problem.target, keys)
        for is_dual in (False, True):
            matrix = _least_squares(mixed, problem.target, current, name, is_dual, keys)
            if matrix is None:
                continue
            matrix = torch.linalg.inv(matrix).mT if is_dual else matrix
            moved = mixed.mix({key: current[key].double() for key in keys}, {name: matrix.to(problem.device)})
            distance = _distance(moved, problem.target, keys)
            if distance < best:
                best, found[name] = distance, matrix
    return Transform(symmetry.identity(), {}, found)


def _lengthen(mixed: MixedTensors, target: State, source: State, name: str, keys: Sequence[str]) -> Tensor:
    """Numbers for pairs of units that bring queries times s and keys over s closest to the target, each by Newton's method.

    The distance is a s^2 - 2 b s + c / s^2 - 2 d / s but for a constant. As a function of the logarithm of s it is convex
    where b and d are not negative; steps are bounded, and what is not lower in the end is left at one.
    """
    squares, products = [], []
    for is_dual in (False, True):
        square = product = torch.zeros(())
        for key in keys:
            pairs = (mixed.unfold(key, state[key].double(), name, is_dual) for state in (target, source))
            for theirs, ours in zip(*pairs, strict=True):
                square = square.to(ours.device) + ours.square().sum((-2, -1))
                product = product.to(ours.device) + (theirs * ours).sum((-2, -1))
        squares.append(square.cpu())
        products.append(product.cpu())
    (a, c), (b, d) = squares, products

    def cost(t: Tensor) -> Tensor:
        return a * (2 * t).exp() - 2 * b * t.exp() + c * (-2 * t).exp() - 2 * d * (-t).exp()

    t = torch.zeros_like(a)
    for _ in range(_NUM_NEWTON):
        slope = 2 * (a * (2 * t).exp() - b * t.exp() - c * (-2 * t).exp() + d * (-t).exp())
        curvature = 2 * (2 * a * (2 * t).exp() - b * t.exp() + 2 * c * (-2 * t).exp() - d * (-t).exp())
        step = torch.where(curvature > 0, slope / curvature, slope.sign() * 0.1)
        t = t - torch.nan_to_num(step).clamp(-0.5, 0.5)
    t = torch.where(cost(t) < cost(torch.zeros_like(t)), t, torch.zeros_like(t))
    return turn(torch.zeros_like(t), t.exp())


def _least_squares(
    mixed: MixedTensors, target: State, source: State, name: str, is_dual: bool, keys: Sequence[str]
) -> Tensor | None:
    """The matrix that brings what it multiplies of the source closest to the target; None if it is not well determined."""
    cross = square = None
    for key in keys:
        pairs = (mixed.unfold(key, state[key].double(), name, is_dual) for state in (target, source))
        for theirs, ours in zip(*pairs, strict=True):
            cross = theirs @ ours.mT + (0 if cross is None else cross)
            square = ours @ ours.mT + (0 if square is None else square)
    if cross is None or square is None or not float(torch.linalg.cond(square).max()) < 1e8:
        return None
    matrix = torch.linalg.solve(square, cross.mT).mT.cpu()
    return matrix if float(torch.linalg.cond(matrix).max()) < 1e4 else None


def _distance(state: Mapping[str, Tensor], target: State, keys: Sequence[str]) -> float:
    return sum(float((state[key].double() - target[key].double()).square().sum()) for key in keys)


def _trusted(symmetry: Symmetry, keys: list[str], decided: Collection[str]) -> list[str]:
    """The tensors on which no other groups are left to decide; all if there are none."""
    return [key for key in keys if names(symmetry.layouts[key]) & symmetry.groups.keys() <= set(decided)] or keys


def _decide(
    symmetry: Symmetry, bases: Mapping[str, Basis], scores: Mapping[str, Tensor], signed: Mapping[str, Tensor]
) -> Transform:
    """The best permutation of some groups, and the best rotations after it.

    Args:
        symmetry: of the groups.
        bases: of the groups, by name.
        scores: of the groups.
        signed: for groups whose units may change their signs, the part of the scores that changes with them.
    """
    mixed = {n: CrossProducts(symmetry, b, signed.get(b.group, scores[b.group])) for n, b in bases.items()}
    found = {name: value.double().cpu() for name, value in scores.items()}
    for each in mixed.values():
        group = each.basis.group
        found[group] = each.scores() + (found[group] - each.total if group in signed else 0)
    groups = [symmetry.groups[name] for name in scores]
    permutation = harden(symmetry, found, groups)
    return Transform(permutation, {}, {name: each.rotations(permutation) for name, each in mixed.items()})
