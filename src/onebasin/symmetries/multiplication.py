"""What scales and bases do to tensors, apart from permutations; random ones for verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetries.basis_matrices import MixedTensors, random_matrices
from onebasin.symmetries.scales import ScaledTensors
from onebasin.symmetries.structure import Basis, Scale, Structure
from onebasin.tensors.states import LazyState, State

ROUNDING = 1e-12
"""What changes of basis may change, relative to the largest output: zeros do not stay zero."""


def scaled_tensors(symmetry: Structure) -> ScaledTensors:
    """Multiplies the tensors of a symmetry by its scales."""
    return ScaledTensors(symmetry.scales, symmetry.groups, symmetry.layouts, symmetry.sizes)


def mixed_tensors(symmetry: Structure) -> MixedTensors:
    """Multiplies the tensors of a symmetry by the matrices of its bases."""
    return MixedTensors(symmetry.bases, symmetry.layouts)


def scale_shape(symmetry: Structure, scale: Scale) -> tuple[int, ...]:
    """One number for each unit: (*parent sizes, size)."""
    group = symmetry.groups[scale.group]
    return (*(symmetry.sizes[parent] for parent in group.parents), group.size)


def matrix_shape(symmetry: Structure, basis: Basis) -> tuple[int, ...]:
    """One matrix for each member of a family: (*parent sizes, size, size); of signs the diagonal, (*parent sizes, size)."""
    size = symmetry.sizes[basis.group]
    above = (symmetry.sizes[parent] for parent in basis.parents)
    return (*above, size) if basis.kind == "signed" else (*above, size, size)


def draw(symmetry: Structure, generator: torch.Generator | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random logarithms of all scales, and random well-conditioned matrices of all bases, by name."""
    logarithms = {
        name: 0.5 * torch.randn(scale_shape(symmetry, scale), generator=generator, dtype=torch.float64)
        for name, scale in symmetry.scales.items()
    }
    return logarithms, {
        name: random_matrices(matrix_shape(symmetry, basis), basis.kind, generator) for name, basis in symmetry.bases.items()
    }


def check_fixed(symmetry: Structure, state: State) -> None:
    """Refuse a state whose gains are not those that changes of basis need.

    Raises:
        ValueError: naming the first.
    """
    for key, number in symmetry.fixed.items():
        if key in state and not bool((state[key] == number).all()):
            raise ValueError(
                f"{key!r} must be filled with {number:g} for a change of basis: fold the gains of norms into the layers "
                "around them, by onebasin.canonical or the command onebasin canonical"
            )


def describe_changes(symmetry: Structure, *first: str) -> str:
    """What scales and matrices do, and before it what else is done, for messages."""
    words = [*first, *["scaling"] * bool(symmetry.scales), *["changing the basis"] * bool(symmetry.bases)]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


class UnpermutedSymmetry:
    """A symmetry whose random elements are scales and matrices without a permutation, in float64, for verification."""

    def __init__(self, symmetry: Structure):
        self.groups, self.ties, self.unreached = symmetry.groups, symmetry.ties, symmetry.unreached
        self.fixed, self.rounding = symmetry.fixed, ROUNDING if symmetry.bases else 0.0
        self.change = describe_changes(symmetry)
        self._symmetry = symmetry

    def random(self, generator: torch.Generator | None = None) -> _Multiplication:
        """Random scales and matrices."""
        return _Multiplication(self._symmetry, *draw(self._symmetry, generator))

    def random_cycles(self, generator: torch.Generator | None = None) -> _Multiplication:
        """The same: all of them change something."""
        return self.random(generator)


@dataclass(frozen=True)
class _Multiplication:
    """Scales and matrices by the names that they have in a symmetry."""

    symmetry: Structure
    logarithms: Mapping[str, Tensor]
    matrices: Mapping[str, Tensor]

    def apply(self, model: LazyState) -> LazyState:
        scaled, mixed = scaled_tensors(self.symmetry), mixed_tensors(self.symmetry)
        matrices = {name: matrix.to(model.device) for name, matrix in self.matrices.items()}

        def multiply(key: str, value: Tensor) -> Tensor:
            return mixed.mix({key: scaled.scale(key, value, self.logarithms)}, matrices)[key]

        return model.to(model.device, torch.float64).map(multiply)

    def only(self, group: str) -> _Multiplication:
        scales, bases = self.symmetry.scales, self.symmetry.bases
        return _Multiplication(
            self.symmetry,
            {name: value for name, value in self.logarithms.items() if scales[name].group == group},
            {name: value for name, value in self.matrices.items() if bases[name].group == group},
        )
