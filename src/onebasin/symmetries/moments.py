"""What follows a transform of an optimiser's state, so that its next step is the transformed step.

If parameters are multiplied by T, gradients are multiplied by the inverse transpose of T. A step along the gradient is the
transformed step if these two are the same: for permutations, for changes of sign, and for rotations. Optimisers that divide
entry by entry, such as Adam, tell a rotation from none, so under rotations only momentum follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.symmetries.layout import names as names_in
from onebasin.symmetries.structure import Structure

_MOMENTUM = "momentum_buffer"
"""An average of gradients that is all an optimiser keeps: that of SGD."""
_FIRST = (_MOMENTUM, "exp_avg", "grad_avg", "prev")
"""Entries of PyTorch's optimisers that are gradients, or averages of them."""
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "step_size")
"""Entries that do not change if gradients change their signs: averages of squares, absolute values and sizes of steps."""
_ANEW = "start the optimiser anew"
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Moments:
    """Moves the entries of an optimiser's state.

    Attributes:
        symmetry: of the transform.
        logarithms: of its scales, by name; those that do something.
        matrices: of its bases, by name; those that do something.
        permute: moves a tensor as the parameter of a key is moved by the permutation.
        multiply: multiplies it as that is multiplied by the matrices afterwards.
    """

    symmetry: Structure
    logarithms: Mapping[str, Tensor]
    matrices: Mapping[str, Tensor]
    permute: Callable[[str, Tensor], Tensor]
    multiply: Callable[[str, Tensor], Tensor]

    def check_trained(self, keys: Iterable[str]) -> None:
        """Refuse parameters that a change of basis needs to be filled with one number: a step would change that.

        Raises:
            ValueError: naming the first.
        """
        mixed = {self.symmetry.bases[name].group for name in self.matrices if not self._is_signed(name)}
        for key in keys:
            if key in self.symmetry.fixed and not mixed.isdisjoint(names_in(self.symmetry.layouts[key])):
                raise ValueError(
                    f"the optimiser trains {key!r}, which has no counterpart in another basis: leave gains of norms out of "
                    f"it, or {_ANEW}"
                )

    def move(self, entry: str, key: str, value: Tensor) -> Tensor:
        """One entry of the state of one parameter.

        Raises:
            ValueError: if nothing that is moved makes the next step the transformed one.
        """
        what = f"the optimiser's {entry!r} of {key!r} cannot follow"
        scaled = [name for name in self.logarithms if key in self.symmetry.scales[name].powers]
        mixing = [name for name in self.matrices if key in self.symmetry.bases[name].places]
        stretching = [name for name in mixing if not self._is_signed(name) and not _is_rotation(self.matrices[name])]
        if scaled or stretching:
            how = "positive scales" if scaled else "maps that change lengths"
            raise ValueError(
                f"{what} {how}: gradients are divided by what parameters are multiplied by, so that its next step would "
                f"not be the transformed one; {_ANEW}"
            )
        is_rotated = not all(map(self._is_signed, mixing))
        if is_rotated and entry != _MOMENTUM:
            raise ValueError(
                f"{what} a rotation: it is used entry by entry, and mixed entries are others. The momentum of SGD can "
                f"follow; {_ANEW}"
            )
        if mixing and entry not in (*_FIRST, *_SECOND):
            raise ValueError(f"{what} a change of sign: it is not known whether it changes its own; {_ANEW}")
        moved = self.permute(key, value)
        return self.multiply(key, moved) if mixing and entry in _FIRST else moved

    def _is_signed(self, name: str) -> bool:
        return self.symmetry.bases[name].kind == "signed"


def _is_rotation(matrices: Tensor) -> bool:
    unit = torch.eye(matrices.shape[-1], dtype=matrices.dtype).expand_as(matrices)
    return torch.allclose(matrices @ matrices.mT, unit, atol=_TOLERANCE)
