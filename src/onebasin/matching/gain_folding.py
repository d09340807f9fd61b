"""Fold gains into the layers around them: a gain is multiplied by a scale, and what reads the norm is divided by it.

A gain that can be folded is a scale of the symmetry, so no list of architectures is needed. With s = 1 / gain the gain
becomes one. Norms that multiply by 1 + weight have the gain 1 + weight, which is one where the weight is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onebasin.symmetries import Scale, Symmetry
from onebasin.symmetries.layout import factors
from onebasin.symmetries.multiplication import scale_shape, scaled_tensors
from onebasin.symmetries.scales import ScaledTensors

_ZEROS = "some of the numbers that it multiplies by are zero"
_BY_FUNCTION = "units are multiplied by a function of it, and not by itself"


@dataclass(frozen=True)
class FoldedGains:
    """What takes the gains of a state into the layers around them, tensor by tensor.

    Attributes:
        symmetry: of the state.
        keys: of the gains that were not one, and become one.
        left: for every other gain the reason why it does not.
        logarithms: of the scales that tensors are multiplied by, by name. They are of the absolute values of gains.
        signs: of the same gains, by the names of the scales; 1 or -1.
    """

    symmetry: Symmetry
    keys: tuple[str, ...]
    left: Mapping[str, str]
    logarithms: Mapping[str, Tensor]
    signs: Mapping[str, Tensor]

    @property
    def is_positive(self) -> bool:
        """Whether no folded gain was negative, so that the scales are all that is done."""
        return all(bool((sign > 0).all()) for sign in self.signs.values())

    @cached_property
    def _tensors(self) -> ScaledTensors:
        return scaled_tensors(self.symmetry)

    def move(self, key: str, value: Tensor) -> Tensor:
        """A tensor of the state, in float64, where the gains are one; itself if nothing is done to it."""
        if key in self.keys:
            neutral = self.symmetry.gains[key]
            assert neutral is not None
            return torch.full_like(value, neutral)
        return self._tensors.flip(key, self._tensors.scale(key, value, self.logarithms), self.signs)


def fold_gains(symmetry: Symmetry, state: Mapping[str, Tensor], reasons: Mapping[str, str]) -> FoldedGains:
    """Find how to fold all gains of a state that can be folded. Of the state, gains alone are read.

    A scale that multiplies a gain multiplies no other one, so that each can be folded by itself.

    Args:
        symmetry: of all kinds.
        state: with the gains.
        reasons: for some gains that have no scale of their own why that is.
    """
    keys: list[str] = []
    left: dict[str, str] = {}
    logarithms: dict[str, Tensor] = {}
    signs: dict[str, Tensor] = {}
    for key in symmetry.gains:
        gain = read_gain(symmetry, key, state)
        if gain is None:
            left[key] = _BY_FUNCTION
            continue
        if bool((gain == 1).all()):
            continue
        found = find_scale(symmetry, key)
        if isinstance(found, str):
            left[key] = reasons.get(key, found)
        elif not bool((gain != 0).all()) or not bool(gain.isfinite().all()):
            left[key] = _ZEROS
        else:
            ((_, _, exponent),) = found.powers[key]
            gain = gain.cpu().view(scale_shape(symmetry, found))
            logarithms[found.name], signs[found.name] = -gain.abs().log() / exponent, gain.sign()
            keys.append(key)
    return FoldedGains(symmetry, tuple(keys), left, logarithms, signs)


def read_gain(symmetry: Symmetry, key: str, state: Mapping[str, Tensor]) -> Tensor | None:
    """What a vector multiplies units by, in float64; None if that is another function of it than a sum."""
    neutral = symmetry.gains[key]
    return None if neutral is None else state[key].double() + (1 - neutral)


def find_scale(symmetry: Symmetry, key: str) -> Scale | str:
    """The scale that multiplies a gain and no other; or why there is none."""
    scales = [scale for scale in symmetry.scales.values() if key in scale.powers]
    layout = symmetry.layouts[key][0]
    if (key, 0) in symmetry.pinned and not any(factor.name in symmetry.groups for factor in factors(layout)):
        return f"its units are not free: {symmetry.pinned[key, 0]}"
    if len(scales) != 1:
        return "it cannot be multiplied without changing what reads it" if not scales else "several scales multiply it"
    if math.prod(scale_shape(symmetry, scales[0])) != layout.size:
        return "some of its units cannot be multiplied without changing what reads them"
    others = [other for other in symmetry.gains if other != key and other in scales[0].powers]
    if others:
        return f"it shares its scale with {others[0]}"
    (power,) = scales[0].powers[key]
    return scales[0] if power.exponent in (1, -1) else "it is not multiplied by its scale alone"
