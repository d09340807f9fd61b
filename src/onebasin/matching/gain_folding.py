"""Fold gains into the layers around them: a gain is multiplied by a scale, and what reads the norm is divided by it.

A gain that can be folded is a scale of the symmetry, or several ones that share its entries: four tokens that are
concatenated before their norm have a scale each. So no list of architectures is needed. With s = 1 / gain the gain becomes
one. Norms that multiply by 1 + weight have the gain 1 + weight, which is one where the weight is zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from onebasin.symmetries import Scale, Symmetry
from onebasin.symmetries.layout import factors
from onebasin.symmetries.multiplication import scale_shape, scaled_tensors
from onebasin.symmetries.scales import ScaledTensors

_ZEROS = "some of the numbers that it multiplies by are zero"
_NOT_FINITE = "some of the numbers that it multiplies by are not finite"
_SIGNS = "some of the numbers that it multiplies by are negative, and what reads it depends on their signs"
_BY_FUNCTION = "units are multiplied by a function of it, and not by itself"
_NO_SCALE = "it cannot be multiplied without changing what reads it"
_IN_PART = "some of its units cannot be multiplied without changing what reads them"
_ALIKE = "several of its units can be multiplied by the same number alone"
_POWERS = "it is not multiplied by its scale alone"


@dataclass(frozen=True)
class FoldedGains:
    """What takes the gains of a state into the layers around them, tensor by tensor.

    Attributes:
        symmetry: of the state.
        scales: for the gains that were not one, and become one, the names of the scales that multiply them.
        ones: the gains that are one then, these and those that were one before, each with the number its vector has.
        left: for every other gain the reason why it is not.
        logarithms: of the scales that tensors are multiplied by, by name. They are of the absolute values of gains.
        signs: of the same gains, by the names of the scales; 1 or -1.
    """

    symmetry: Symmetry
    scales: Mapping[str, tuple[str, ...]]
    ones: Mapping[str, float]
    left: Mapping[str, str]
    logarithms: Mapping[str, Tensor]
    signs: Mapping[str, Tensor]

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the gains that were not one, and become one."""
        return tuple(self.scales)

    @property
    def negative(self) -> tuple[str, ...]:
        """Of those gains the ones with negative entries."""
        return tuple(key for key, names in self.scales.items() if any(bool((self.signs[name] < 0).any()) for name in names))

    @property
    def is_positive(self) -> bool:
        """Whether no folded gain was negative, so that the scales are all that is done."""
        return not self.negative

    def only(self, key: str) -> FoldedGains:
        """What folds one of the gains."""
        names = self.scales[key]
        logarithms, signs = ({name: each[name] for name in names} for each in (self.logarithms, self.signs))
        return replace(self, scales={key: names}, logarithms=logarithms, signs=signs)

    @cached_property
    def _tensors(self) -> ScaledTensors:
        return scaled_tensors(self.symmetry)

    def move(self, key: str, value: Tensor) -> Tensor:
        """A tensor of the state, in float64, where the gains are one; itself if nothing is done to it."""
        if key in self.scales:
            return torch.full_like(value, self.ones[key])
        return self._tensors.flip(key, self._tensors.scale(key, value, self.logarithms), self.signs)


def fold_gains(
    symmetry: Symmetry, state: Mapping[str, Tensor], reasons: Mapping[str, str], rigid: Collection[str] = ()
) -> FoldedGains:
    """Find how to fold all gains of a state that can be folded. Of the state, gains alone are read.

    A scale that multiplies a folded gain multiplies no other gain, so that each can be folded by itself.

    Args:
        symmetry: of all kinds.
        state: with the gains.
        reasons: for some gains that have no scale of their own why that is.
        rigid: negative gains that are left: what reads them lets positive factors through, and no signs, as a ReLU.
    """
    scales: dict[str, tuple[str, ...]] = {}
    ones: dict[str, float] = {}
    left: dict[str, str] = {}
    logarithms: dict[str, Tensor] = {}
    signs: dict[str, Tensor] = {}
    for key, neutral in symmetry.gains.items():
        gain = read_gain(symmetry, key, state)
        if gain is None or neutral is None:
            left[key] = _BY_FUNCTION
            continue
        if bool((gain == 1).all()):
            ones[key] = neutral
            continue
        found = find_scales(symmetry, key)
        if isinstance(found, str):
            left[key] = reasons.get(key, found)
        elif not bool(gain.isfinite().all()):
            left[key] = _NOT_FINITE
        elif not bool((gain != 0).all()):
            left[key] = _ZEROS
        elif key in rigid:
            left[key] = _SIGNS
        else:
            tensors = _of_one_tensor(symmetry, key)
            for scale in found:
                ((exponent, part),) = tensors.sum_by_unit(key, gain, scale.name, scale_shape(symmetry, scale))
                logarithms[scale.name], signs[scale.name] = -part.abs().log() / exponent, part.sign()
            scales[key], ones[key] = tuple(scale.name for scale in found), neutral
    return FoldedGains(symmetry, scales, ones, left, logarithms, signs)


def read_gain(symmetry: Symmetry, key: str, state: Mapping[str, Tensor]) -> Tensor | None:
    """What a vector multiplies units by, in float64; None if that is another function of it than a sum."""
    neutral = symmetry.gains[key]
    return None if neutral is None else state[key].double() + (1 - neutral)


def find_scales(symmetry: Symmetry, key: str) -> tuple[Scale, ...] | str:
    """Scales that multiply each entry of a gain by a number of its own, and no other gain; or why there are none."""
    scales = [scale for scale in symmetry.scales.values() if key in scale.powers]
    layout = symmetry.layouts[key][0]
    if (key, 0) in symmetry.pinned and not any(factor.name in symmetry.groups for factor in factors(layout)):
        return f"its units are not free: {symmetry.pinned[key, 0]}"
    if not scales:
        return _NO_SCALE
    shared = [[other for other in symmetry.gains if other != key and other in scale.powers] for scale in scales]
    alone = [scale for scale, others in zip(scales, shared, strict=True) if not others]
    if not alone:
        return f"it shares its scale with {shared[0][0]}"
    exponents = _of_one_tensor(symmetry, key).exponents(key)
    covered, reason = torch.zeros(layout.size, dtype=torch.bool), _IN_PART
    found = []
    for scale in alone:
        exponent = exponents[scale.name].expand(layout.size)
        here, num_units = exponent != 0, math.prod(scale_shape(symmetry, scale))
        if not bool((exponent[here].abs() == 1).all()):
            reason = _POWERS
        elif int(here.sum()) != num_units:
            reason = _ALIKE
        elif not bool((covered & here).any()):
            covered |= here
            found.append(scale)
    return tuple(found) if bool(covered.all()) else reason


def _of_one_tensor(symmetry: Symmetry, key: str) -> ScaledTensors:
    """What multiplies one tensor by scales: those of the others take long to lay out."""
    found = [scale for scale in symmetry.scales.values() if key in scale.powers]
    scales = {scale.name: replace(scale, powers={key: scale.powers[key]}) for scale in found}
    return ScaledTensors(scales, symmetry.groups, symmetry.layouts, symmetry.sizes)
