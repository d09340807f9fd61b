"""Matrices of changes of basis that can be learned: exponentials, times a start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetries.basis_matrices import complement_of_ones, pair, turn
from onebasin.symmetries.multiplication import matrix_shape
from onebasin.symmetries.structure import Basis, Structure

LIMIT = 2.0
"""Of the logarithms of singular values, if nothing else is asked for: see `bound_stretch`."""
_NUM_TERMS, _NUM_SQUARINGS = 8, 4


class LearnedBases:
    """All bases of a symmetry: matrices that are learned, and signs, which stay as they start.

    Args:
        symmetry: whose bases they are.
        start: matrices by the names of their bases; the identity where there is none.
        device: of what is learned.
        limit: see `LearnedBasis`.
    """

    def __init__(self, symmetry: Structure, start: Mapping[str, Tensor], device: torch.device, limit: float = LIMIT):
        self._signs = {n: m.to(device) for n, m in start.items() if symmetry.bases[n].kind == "signed"}
        self._learned = [
            LearnedBasis(basis, matrix_shape(symmetry, basis), start.get(name), device, limit)
            for name, basis in symmetry.bases.items()
            if basis.kind != "signed"
        ]
        self._limit = limit

    @property
    def generators(self) -> list[Tensor]:
        """What the matrices are made of."""
        return [basis.generator for basis in self._learned]

    def replace_generators(self, generators: Iterable[Tensor]) -> None:
        """Learn these tensors, such as parameters of a module, in place of the own ones."""
        for basis, generator in zip(self._learned, generators, strict=True):
            basis.generator = generator

    def plans(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """As `MixedTensors.mix_with` takes them."""
        plans = (
            {n: m.to(self._learned[0].generator.device) for n, m in self._signs.items()} if self._learned else self._signs
        )
        exponents = self._exponents(dtype)
        grown = iter(exponentials([exponent for each in exponents for exponent in each]))
        for basis, each in zip(self._learned, exponents, strict=True):
            plans |= pair(basis.basis.name, *basis.matrices([next(grown) for _ in each], dtype))
        return plans

    def matrices(self) -> dict[str, Tensor]:
        """In float64, without a gradient: there a rotation is one to rounding."""
        with torch.no_grad():
            found = dict(self._signs)
            for basis, exponents in zip(self._learned, self._exponents(torch.float64), strict=True):
                found[basis.basis.name] = basis.matrices(exponentials(exponents), torch.float64)[0]
            return found

    def _exponents(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Of each basis, those of one size bounded together."""
        free = [basis.generator.to(dtype) for basis in self._learned if basis.is_free]
        bounded = iter(_by_size(lambda each: bound_stretch(each, self._limit), free))
        return [basis.exponents(next(bounded) if basis.is_free else basis.generator.to(dtype)) for basis in self._learned]


class LearnedBasis:
    """Matrices exp(G) M with a start M, and their duals exp(-G^T) M^-T, differentiable in what G is made of.

    G is bounded (`bound_stretch`), so that the condition number is at most exp(2 limit) times that of the start.

    Args:
        basis: any but one of signs.
        shape: of the matrices.
        start: the identity if None.
        device: of the generator.
        limit: of the logarithms of the singular values of exp(G).

    Attributes:
        generator: what G is made of; zero at the start.
    """

    def __init__(
        self, basis: Basis, shape: tuple[int, ...], start: Tensor | None, device: torch.device, limit: float = LIMIT
    ):
        self.basis, self._limit = basis, limit
        size = shape[-1] - 1 if basis.kind == "centred" else shape[-1]
        self.generator = torch.zeros((*shape[:-2], size, size), device=device, requires_grad=True)
        first = torch.eye(shape[-1], dtype=torch.float64).expand(shape) if start is None else start.double().cpu()
        self._first = {}
        for dtype in (torch.float32, torch.float64):
            self._first[dtype] = [m.to(device, dtype) for m in (first, torch.linalg.inv(first).mT)]
        self._inside = complement_of_ones(shape[-1]).to(device)

    @property
    def is_free(self) -> bool:
        """Whether G is any matrix, and has to be bounded: rotations are not stretched."""
        return self.basis.kind == "linear"

    def exponents(self, made: Tensor) -> list[Tensor]:
        """G, and -G^T where its exponential is another one; nothing for a rotary basis, whose matrices need none.

        Args:
            made: the generator, in float32 or float64; bounded if it is free.
        """
        if self.basis.is_rotary:
            return []
        if self.is_free:
            return [made, -made.mT]
        made = made - made.mT
        if self.basis.kind == "centred":
            inside = self._inside.to(made)
            made = inside @ made @ inside.mT
        return [made]

    def matrices(self, grown: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The matrices and their duals, in float32 or float64, from the exponentials of the exponents."""
        start, dual = (matrix.to(self.generator.device) for matrix in self._first[dtype])
        if self.basis.is_rotary:
            made = self.generator.to(dtype)
            growth, angle = self._limit * torch.tanh(made[..., 0, 0] / self._limit), made[..., 1, 0]
            grown = [turn(angle, growth.exp()), turn(angle, (-growth).exp())]
        return grown[0] @ start, grown[-1] @ dual


def exponentials(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The exponential of each matrix or batch of matrices; those of one size are computed together."""
    return _by_size(exponential, matrices)


def _by_size(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """What a function of batches makes of each matrix or batch of matrices, by one call for those of one size."""
    result = list(matrices)
    for size in dict.fromkeys(matrix.shape[-1] for matrix in matrices):
        places = [place for place, matrix in enumerate(matrices) if matrix.shape[-1] == size]
        flat = [matrices[place].reshape(-1, size, size) for place in places]
        made = function(torch.cat(flat)).split([len(part) for part in flat])
        for place, part in zip(places, made, strict=True):
            result[place] = part.view(matrices[place].shape)
    return result


def bound_stretch(matrix: Tensor, limit: float) -> Tensor:
    """Matrices whose exponentials have singular values between exp(-limit) and exp(limit); small ones stay as they are.

    The symmetric part S of a matrix, with the eigenvalues s_i, is divided by (1 + sum_i (s_i / limit)^16)^(1/16). This is
    more than max_i |s_i| / limit, so no eigenvalue of the new S is beyond the limit. For every matrix G with the symmetric
    part S, |exp(G)| <= exp(max_i s_i) in the spectral norm, because d|x|^2/dt = 2 x^T S x along the solutions of
    dx/dt = G x; and exp(-G) is bounded by -S alike. A skew-symmetric matrix, whose exponential is a rotation, has S = 0 and
    is returned as it is.
    """
    symmetric, skew = (matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    # Divided by its norm where that is large, so that no power overflows. The result does not depend on this number.
    norm = torch.linalg.matrix_norm(symmetric.detach(), keepdim=True).div(limit).clamp(min=1)
    power = symmetric / (limit * norm)
    for _ in range(3):
        power = power @ power
    shrunk = (norm**-16 + power.square().sum((-2, -1), keepdim=True)) ** (-1 / 16) / norm
    return skew + shrunk * symmetric


def exponential(matrix: Tensor) -> Tensor:
    """The exponential of matrices: in float64 by PyTorch, else by a fixed number of products, which a CUDA graph can hold.

    A Taylor polynomial of a sixteenth of the matrix, squared four times, is exact to float32 up to a norm of eight.
    """
    if matrix.dtype == torch.float64:
        return torch.linalg.matrix_exp(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    small, result = matrix / 2**_NUM_SQUARINGS, identity
    for number in range(_NUM_TERMS, 0, -1):
        result = identity + small @ result / number
    for _ in range(_NUM_SQUARINGS):
        result = result @ result
    return result
