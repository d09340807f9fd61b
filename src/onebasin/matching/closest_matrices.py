"""The matrices that bring the units of one network closest to those of another, from the cross products of their units.

A basis multiplies what makes units by a matrix M, and what reads them by its dual. Where the tensors do not span the units,
M is known in part only: the rest of it changes nothing in these tensors, and is chosen so that M is well conditioned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.symmetries.basis_matrices import turn

_NUM_COMPLETIONS = 20


class Known(NamedTuple):
    """The directions of the target in which a basis is known, as projections, (*parent sizes, size, size) each.

    Attributes:
        made: of all that the matrix multiplies, as it makes units; what reads the units tells them.
        read: of all that its dual multiplies; what makes the units tells them.
    """

    made: Tensor
    read: Tensor

    @property
    def rank(self) -> float:
        """The number of directions, of both."""
        return sum(float(each.diagonal(dim1=-2, dim2=-1).sum()) for each in self)


def closest_rotation(
    products: Tensor, size: float, tolerance: float, kind: str = "orthogonal", known: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The rotation that brings units closest to the target: U V^T of the singular vectors of their cross products.

    Args:
        products: (*, n, n), target times source.
        size: the largest that the sum of singular values could be.
        tolerance: directions whose singular values are smaller, relative to the mean of the largest, are not known.
        kind: "centred" rotations keep the vector of ones.
        known: a projection onto directions that are known already, and stay.

    Returns:
        The rotations, and a projection onto the directions that are known; None if all are.
    """
    units, size = products.shape[-1], size or 1.0
    if known is None and kind == "centred":
        known = torch.full_like(products, 1 / units)
    if known is not None:
        rest = torch.eye(units).to(products) - known
        products = rest @ products @ rest + size * known
    left, values, right = torch.linalg.svd(products)
    is_known = values > tolerance * size / units
    if bool(is_known.all()):
        return left @ right, None
    return left @ right, (left * is_known.unsqueeze(-2)) @ left.mT


def closest_turn(products: Tensor) -> Tensor:
    """The rotations of pairs of units, read as complex numbers, by the angles of their cross products, (*, 2, 2)."""
    real, imaginary = complex_sum(products)
    return turn(torch.atan2(imaginary, real), torch.ones_like(real))


def complex_sum(products: Tensor) -> tuple[Tensor, Tensor]:
    """Cross products of two pairs of units as complex numbers: the sum of target times the conjugate of source."""
    return products[..., 0, 0] + products[..., 1, 1], products[..., 1, 0] - products[..., 0, 1]


def closest_map(products: Tensor, made: Tensor, read: Tensor, tolerance: float) -> tuple[Tensor, Known | None]:
    """The matrices M with the least |M A - A'|^2 + |M^T B' - B|^2, for what makes units, A, and what reads them, B.

    Both are linear in M, and M = V X U^T solves them, for the eigenvectors U of A A^T and V of B' B'^T: entry by entry,
    (h_i + g_j) X_ij is that of the cross products.

    Args:
        products: (*, n, n), A' A^T + B' B^T, where A' and B' are the target's.
        made: (*, n, n), A A^T.
        read: (*, n, n), B' B'^T.
        tolerance: smaller eigenvalues, relative to their mean, count as zero.

    Returns:
        The matrices, and where they are known; None if they are known throughout.
    """
    (sizes_read, left), (sizes_made, right) = torch.linalg.eigh(read), torch.linalg.eigh(made)
    is_read, is_made = (sizes > tolerance * sizes.mean(-1, keepdim=True) for sizes in (sizes_read, sizes_made))
    is_known = is_read.unsqueeze(-1) | is_made.unsqueeze(-2)
    sums = sizes_read.unsqueeze(-1) + sizes_made.unsqueeze(-2)
    found = torch.where(is_known, (left.mT @ products @ right) / sums, 0.0)
    if bool(is_known.all()):
        return left @ found @ right.mT, None
    found = _complete(found, is_known)
    columns, values, _ = torch.linalg.svd(left @ found * is_made.unsqueeze(-2))
    reached = columns * (values > tolerance * values.amax(-1, keepdim=True)).unsqueeze(-2)
    known = Known((left * is_read.unsqueeze(-2)) @ left.mT, reached @ reached.mT)
    return left @ found @ right.mT, known


def _complete(matrix: Tensor, is_known: Tensor) -> Tensor:
    """Choose the entries that are not known so that all singular values are alike, by turns with the closest rotation."""
    for _ in range(_NUM_COMPLETIONS):
        left, values, right = torch.linalg.svd(matrix)
        size = values.square().sum(-1) / values.sum(-1).clamp(min=torch.finfo(values.dtype).tiny)
        size = torch.where(size > 0, size, 1.0)  # of a matrix of which nothing is known
        matrix = torch.where(is_known, matrix, size[..., None, None] * (left @ right))
    return matrix


def explained_by_maps(products: Tensor, made: Tensor, read: Tensor) -> Tensor:
    """Half of the squares that the matrices of `closest_map` explain, without building them; shapes are broadcast."""
    (sizes_read, left), (sizes_made, right) = torch.linalg.eigh(read), torch.linalg.eigh(made)
    sums = sizes_read.unsqueeze(-1) + sizes_made.unsqueeze(-2)
    smallest = 1e-12 * sums.mean((-2, -1), keepdim=True).clamp(min=torch.finfo(sums.dtype).tiny)
    shares = (left.mT @ products @ right).square() / sums
    return torch.where(sums > smallest, shares, 0.0).sum((-2, -1)) / 2
