"""Invertible matrices of several bases at once, by conjugate gradients.

A tensor W between two bases with the matrices M and N is a copy of the target's if M W = W' N, which is linear in both. So
where neither is known but in part, both are found together, from all tensors that they enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from onebasin.symmetries import Symmetry
from onebasin.symmetries.basis_matrices import MixedTensors, pair
from onebasin.symmetries.multiplication import matrix_shape

_MAX_STEPS = 2000
_SMALLEST = 1e-28
"""The share of the squares of the first residuals at which they count as zero."""


def solve_together(
    symmetry: Symmetry,
    mixed: MixedTensors,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    bases: Collection[str],
) -> dict[str, Tensor]:
    """The matrices closest to one with the least sum over all tensors of |M W - W' N|^2.

    Args:
        symmetry: with the bases.
        mixed: multiplies tensors by matrices.
        source: tensors that the bases enter, in float64.
        target: the same of the target.
        bases: the names of some bases of kind "linear".
    """
    shapes = {name: matrix_shape(symmetry, symmetry.bases[name]) for name in bases}
    like = next(iter(source.values()))
    units = {name: torch.eye(shape[-1]).to(like).expand(shape) for name, shape in shapes.items()}

    def read(changes: Tensor) -> dict[str, Tensor]:
        parts = changes.split([math.prod(shape) for shape in shapes.values()])
        return {name: units[name] + part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    def residuals(changes: Tensor) -> Tensor:
        found = read(changes)
        made, dual = {}, {}
        for name, matrix in found.items():
            made |= pair(name, matrix, units[name])
            dual |= pair(name, units[name], matrix.mT)
        ours, theirs = mixed.mix_with(source, made), mixed.mix_with(target, dual)
        return torch.cat([(ours[key] - theirs[key]).flatten() for key in source])

    start = torch.zeros(sum(math.prod(shape) for shape in shapes.values())).to(like)
    return {name: matrix.cpu() for name, matrix in read(_least_squares(residuals, start)).items()}


def _least_squares(residuals: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The smallest vector at which the squares of residuals that are linear in it are least."""
    with torch.enable_grad():
        point = start.requires_grad_()
        first = residuals(point)
        weights = torch.zeros_like(first, requires_grad=True)
        (pulled,) = torch.autograd.grad(first, point, weights, create_graph=True)  # linear in the weights

    def pull(changes: Tensor) -> Tensor:
        return torch.autograd.grad(first, point, changes, retain_graph=True)[0]

    def push(direction: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, weights, direction, retain_graph=True)[0]

    found, left = start.detach(), -first.detach()
    direction = gradient = pull(left)
    size = largest = gradient.square().sum()
    for _ in range(_MAX_STEPS):
        if not size > _SMALLEST * largest:
            break
        change = push(direction)
        length = size / change.square().sum()
        found, left = found + length * direction, left - length * change
        gradient = pull(left)
        before, size = size, gradient.square().sum()
        direction = gradient + size / before * direction
    return found
