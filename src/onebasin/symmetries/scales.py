"""Positive scales of units: what makes a unit is multiplied by a number, and what reads it is divided by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onebasin.symmetries.indices import coordinate, covered, find_parent, segments, unravel
from onebasin.symmetries.layout import Factor, Layout, Product, Sum, Term, factors
from onebasin.symmetries.structure import Group, Power, Scale


class ScaledTensors:
    """Multiplies tensors by scales.

    Args:
        scales: by name.
        groups: whose units they belong to.
        layouts: of the tensors.
        sizes: of every name in the layouts.
    """

    def __init__(
        self,
        scales: Mapping[str, Scale],
        groups: Mapping[str, Group],
        layouts: Mapping[str, Layout],
        sizes: Mapping[str, int],
    ):
        self._copies: dict[tuple[int, torch.device], Tensor] = {}
        self._offsets = {key: offset for scale in scales.values() for key, offset in scale.offsets.items()}
        self._places: dict[str, list[tuple[str, float, Tensor | None, tuple[int, ...]]]] = {}
        for scale in scales.values():
            for key, powers in scale.powers.items():
                for power in powers:
                    index, shape = _locate(layouts[key], power, groups[scale.group], sizes)
                    self._places.setdefault(key, []).append((scale.name, power.exponent, index, shape))

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors that some scale multiplies."""
        return tuple(self._places)

    def scale(self, key: str, value: Tensor, logarithms: Mapping[str, Tensor], is_difference: bool = False) -> Tensor:
        """One tensor, multiplied; differentiable in the logarithms of the scales. Itself if no scale enters it.

        Args:
            key: of the tensor.
            value: the tensor.
            logarithms: of some scales.
            is_difference: it is the difference of two tensors, in which the offset that is added to both is gone.
        """
        terms = [exponent * log for exponent, log in self._spread(key, value, logarithms, 0.0)]
        if not terms:
            return value
        total = functools.reduce(torch.add, terms)
        if is_difference or key not in self._offsets:
            return (value * total.exp()).to(value.dtype)
        offset = self._offsets[key]
        return ((value + offset) * total.exp() - offset).to(value.dtype)

    def flip(self, key: str, value: Tensor, signs: Mapping[str, Tensor]) -> Tensor:
        """One tensor, multiplied by numbers that are 1 or -1, where their power is odd."""
        for exponent, sign in self._spread(key, value, signs, 1.0):
            value = value * sign.to(value.dtype) if exponent % 2 else value
        return value

    def exponents(self, key: str) -> dict[str, Tensor]:
        """For each scale that enters a tensor the exponent with which it multiplies each entry, in a shape to broadcast."""
        found: dict[str, Tensor] = {}
        for name, exponent, index, shape in self._places.get(key, ()):
            everywhere = torch.tensor(float(exponent))
            here = everywhere if index is None or bool((index >= 0).all()) else everywhere * (index >= 0).view(shape)
            found[name] = found[name] + here if name in found else here
        return found

    def sum_by_unit(self, key: str, value: Tensor, name: str, shape: Sequence[int]) -> Iterator[tuple[float, Tensor]]:
        """For each way that a scale enters a tensor its exponent, and the sums of the entries that belong to each unit.

        Args:
            key: of the tensor.
            value: of the shape of the tensor.
            name: of the scale.
            shape: of the numbers of the scale.
        """
        for other, exponent, index, along in self._places.get(key, ()):
            if other != name:
                continue
            units = torch.arange(math.prod(along)).view(along) if index is None else index.view(along)
            # Entries with the same unit are summed first where an axis has no part in it: that is most of them.
            value_along = value.detach().cpu()
            for axis, size in enumerate(along):
                if size == 1:
                    value_along = value_along.sum(axis, keepdim=True)
            entries, units = value_along.flatten(), units.flatten()
            total = torch.zeros(math.prod(shape), dtype=value.dtype)
            yield exponent, total.index_add(0, units[units >= 0], entries[units >= 0]).view(tuple(shape))

    def _spread(
        self, key: str, value: Tensor, numbers: Mapping[str, Tensor], elsewhere: float
    ) -> Iterator[tuple[float, Tensor]]:
        """Numbers of units laid out to multiply a tensor, with their exponents."""
        for name, exponent, index, shape in self._places.get(key, ()):
            if name not in numbers:
                continue
            number = numbers[name].to(value.device, torch.promote_types(value.dtype, torch.float32))
            if index is not None:
                index = self._on_device(index, value.device)
                number = torch.where(index < 0, elsewhere, number.flatten()[index.clamp(min=0)])
            yield exponent, number.view(shape)

    def _on_device(self, index: Tensor, device: torch.device) -> Tensor:
        """Copied once: a CUDA graph cannot hold a copy from the host."""
        if (id(index), device) not in self._copies:
            self._copies[id(index), device] = index.to(device)
        return self._copies[id(index), device]


def _locate(layout: Layout, power: Power, group: Group, sizes: Mapping[str, int]) -> tuple[Tensor | None, tuple[int, ...]]:
    """Which unit each entry of a tensor belongs to.

    Returns:
        Its number among all units of the scale, -1 where there is none; None if they count up along the axis. And the shape
        to view them in, broadcastable to the tensor's.
    """
    term = layout[power.axis]
    along = tuple(term.size if axis == power.axis else 1 for axis in range(len(layout)))
    if term.size == group.size and not group.parents:
        return None, along
    context: dict[str, Tensor] = {}
    for parent in group.parents:
        home = find_parent(layout, power.axis, set().union(*(covered(part) for part in _parts(term))), parent)
        if home is not None and home != power.axis:
            found = coordinate(layout[home], parent, torch.arange(layout[home].size))
            context[parent] = found.view([-1 if axis == home else 1 for axis in range(len(layout))])
    position = torch.arange(term.size).view(along)
    shape = torch.broadcast_shapes(along, *(c.shape for c in context.values()))
    context = {name: c.expand(shape) for name, c in context.items()}
    count = iter(range(sum(1 for _ in factors(term)) + 1))
    index = _number(term, position.expand(shape), context, group, power.number, count, sizes)
    return index, shape


def _parts(term: Term) -> Iterator[Term]:
    yield term
    if isinstance(term, Sum):
        for part in term.parts:
            yield from _parts(part)


def _number(
    term: Term,
    position: Tensor,
    context: Mapping[str, Tensor],
    group: Group,
    wanted: int,
    count: Iterator[int],
    sizes: Mapping[str, int],
) -> Tensor:
    """The numbers of units at positions of a term, for the wanted one of the group's factors there."""
    nothing = torch.full_like(position, -1)
    if isinstance(term, Product):
        coordinates = unravel(term.factors, position)
        inside = dict(context)
        for child, sub in zip(term.factors, coordinates, strict=True):
            inside.update({name: coordinate(child, name, sub) for name in covered(child)})
        result = nothing
        for child, sub in zip(term.factors, coordinates, strict=True):
            found = _number(child, sub, inside, group, wanted, count, sizes)
            result = torch.where(found >= 0, found, result)
        return result
    if isinstance(term, Sum):
        result = nothing
        for child, inside, sub in segments(term.parts, position):
            local = {name: c[inside] for name, c in context.items()}
            result[inside] = _number(child, sub, local, group, wanted, count, sizes)
        return result
    if not isinstance(term, Factor) or term.name != group.name or next(count) != wanted:
        return nothing
    number = torch.zeros_like(position)
    for parent in group.parents:
        number = number * sizes[parent] + context[parent]
    return number * group.size + position
