"""Fold gains into the layers around them: a gain is multiplied by a scale, and what reads the norm is divided by it.

A gain that can be folded is a scale of the symmetry, so no list of architectures is needed. With s = 1 / gain the gain
becomes one. Norms that multiply by 1 + weight have the gain 1 + weight, which is one where the weight is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.symmetries import Scale, Symmetry
from onebasin.symmetries.layout import factors
from onebasin.symmetries.multiplication import scale_shape, scaled_tensors
from onebasin.tensors.states import StateDict

_ZEROS = "some of the numbers that it multiplies by are zero"
_BY_FUNCTION = "units are multiplied by a function of it, and not by itself"


class FoldedGains(NamedTuple):
    """What `fold_gains` did to a state.

    Attributes:
        state: in which the gains are one.
        keys: of the gains that were not, and are now.
        left: for every other gain the reason why it is not.
        logarithms: of the scales that the state was multiplied by, by name. They are of the absolute values of gains.
        is_positive: whether no folded gain was negative, so that the scales are all that was done.
    """

    state: StateDict
    keys: tuple[str, ...]
    left: dict[str, str]
    logarithms: dict[str, Tensor]
    is_positive: bool


def fold_gains(symmetry: Symmetry, state: StateDict, reasons: Mapping[str, str]) -> FoldedGains:
    """Fold all gains of a state that can be folded.

    Args:
        symmetry: of all kinds.
        state: in float64.
        reasons: for some gains that have no scale of their own why that is.
    """
    folded, left, is_positive = [], {}, True
    logarithms: dict[str, Tensor] = {}
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
            is_positive = is_positive and bool((gain > 0).all())
            logarithms[found.name] = _find_logarithms(symmetry, found, key, gain)
            state = _fold(symmetry, found, key, state, gain, logarithms[found.name])
            folded.append(key)
    return FoldedGains(state, tuple(folded), left, logarithms, is_positive)


def read_gain(symmetry: Symmetry, key: str, state: Mapping[str, Tensor]) -> Tensor | None:
    """What a vector multiplies units by; None if that is another function of it than a sum."""
    neutral = symmetry.gains[key]
    return None if neutral is None else state[key] + (1 - neutral)


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


def tie(symmetry: Symmetry, state: StateDict) -> StateDict:
    """The state with tied keys as one tensor again."""
    first: dict[str, Any] = {}
    for keys in symmetry.ties:
        first |= dict.fromkeys(keys, state[keys[0]])
    return StateDict({key: first.get(key, value) for key, value in state.items()})


def _find_logarithms(symmetry: Symmetry, scale: Scale, key: str, gain: Tensor) -> Tensor:
    """The logarithms of the scale that makes the absolute values of a gain one."""
    ((_, _, exponent),) = scale.powers[key]
    return -gain.double().cpu().abs().log().view(scale_shape(symmetry, scale)) / exponent


def _fold(symmetry: Symmetry, scale: Scale, key: str, state: StateDict, gain: Tensor, logarithms: Tensor) -> StateDict:
    """A state whose gain is one. Logarithms are of absolute values, so signs are multiplied by themselves."""
    is_negative = (gain < 0).double().cpu().view_as(logarithms)
    tensors = scaled_tensors(symmetry)
    result: dict[str, Any] = dict(state)
    for name in scale.powers:
        flipped = tensors.scale(name, torch.ones_like(state[name]), {scale.name: is_negative}) != 1
        value = tensors.scale(name, state[name], {scale.name: logarithms})
        result[name] = torch.where(flipped, -value, value)
    neutral = symmetry.gains[key]
    assert neutral is not None
    result[key] = torch.full_like(state[key], neutral)
    return tie(symmetry, StateDict(result))
