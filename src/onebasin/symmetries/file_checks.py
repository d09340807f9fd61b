"""Whether what a file says about a symmetry can be true: files come from strangers, and may be damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onebasin.symmetries.layout import factors, names
from onebasin.symmetries.structure import Place, Power, Structure

_MAX_ENTRIES = 2**50
"""Of a tensor. More fit into no memory, and their number into no integer of PyTorch."""


def check_sizes(sizes: Any) -> dict[str, int]:
    """The sizes of groups, by name.

    Raises:
        ValueError: if they are not whole numbers above zero.
    """
    if not isinstance(sizes, dict) or not all(type(size) is int and size > 0 for size in sizes.values()):
        raise ValueError("the sizes of groups must be whole numbers above zero")
    return sizes


def check_loaded(symmetry: Structure, sizes: Mapping[str, int]) -> None:
    """Refuse a symmetry from a file that speaks of tensors, axes or numbers which it does not have.

    Args:
        symmetry: as it was read.
        sizes: of the groups, as the file lists them.

    Raises:
        ValueError: naming what is wrong.
    """
    for name, group in symmetry.groups.items():
        if sizes.get(name) != group.size:
            raise ValueError(
                f"the group {name!r} has size {group.size!r:.20}, and its size is listed as {sizes.get(name)!r}"
            )
    for key, layout in symmetry.layouts.items():
        if unknown := sorted(names(layout) - sizes.keys()):
            raise ValueError(f"the layout of {key!r} has the name {unknown[0]!r:.60}, whose size is not listed")
        if math.prod(term.size for term in layout) > _MAX_ENTRIES:
            raise ValueError(f"the tensor {key!r} is larger than any memory")
    for key in (key for tied in symmetry.ties for key in tied):
        if key not in symmetry.layouts:
            raise ValueError(f"the tied tensor {key!r} has no layout")
    for scale in symmetry.scales.values():
        for key, powers in scale.powers.items():
            for power in powers:
                _check_place(symmetry, key, scale.group, power)
                if not math.isfinite(power.exponent):
                    raise ValueError(f"the scale {scale.name!r} has the power {power.exponent} in {key!r}")
    for basis in symmetry.bases.values():
        for key, places in basis.places.items():
            for place in places:
                _check_place(symmetry, key, basis.group, place)


def _check_place(symmetry: Structure, key: str, group: str, place: Power | Place) -> None:
    """Refuse a place that is not one of the group."""
    layout = symmetry.layouts.get(key)
    if layout is None:
        raise ValueError(f"the tensor {key!r} is scaled or mixed, and has no layout")
    there = factors(layout[place.axis]) if 0 <= place.axis < len(layout) else ()
    if not 0 <= place.number < sum(factor.name == group for factor in there):
        raise ValueError(f"axis {place.axis} of {key!r} is scaled or mixed, and does not hold {group!r} so often")
