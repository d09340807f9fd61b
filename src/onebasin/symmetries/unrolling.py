"""Tensors with their axes taken apart into the factors of their layout, and put together again.

An axis that is a product of factors becomes one axis per factor; an axis that is a sum of segments becomes one block per
segment. In a block every axis that matters is a single factor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebasin.symmetries.layout import Factor, Product, Sum, Switch, Term, factors, find_selector


class Block(NamedTuple):
    """Part of one or more tensors of the same layout, with axes taken apart.

    Attributes:
        labels: for each axis the name of its factor; None where it has none, or is more than a factor.
        origins: for each axis the axis of the whole tensor it came from.
        sizes: for each axis its extent.
        tensors: views of the tensors.
    """

    labels: list[str | None]
    origins: list[int]
    sizes: list[int]
    tensors: tuple[Tensor, ...]

    def parent_axes(self, axis: int, parents: Sequence[str]) -> list[int]:
        """Where the parents of an axis are: one that came from the same axis of the whole tensor goes before another."""
        found = []
        for parent in parents:
            candidates = [a for a, name in enumerate(self.labels) if name == parent]
            own = [a for a in candidates if self.origins[a] == self.origins[axis]]
            found.append((own or candidates)[0])
        return found


def names_to_unroll(groups: Collection[str], parents: Mapping[str, Sequence[str]]) -> set[str]:
    """The names whose axes must be taken apart in order to move some groups: theirs, and those of their parents."""
    return {*groups, *(parent for name in groups for parent in parents.get(name, ()))}


def unroll(
    terms: Sequence[Term], names: Collection[str], *tensors: Tensor, origins: Sequence[int] | None = None
) -> Iterator[Block]:
    """The blocks of tensors of one layout, with every axis that has one of the `names` in it taken apart."""
    origins = range(len(terms)) if origins is None else origins
    if (home := _find_deciding_axis(terms, names)) is not None:
        pieces = (tensor.split([part.size for part in terms[home].parts], dim=home) for tensor in tensors)  # type: ignore
        for number, views in enumerate(zip(*pieces, strict=True)):
            yield from unroll(_choose(terms, home, number), names, *views, origins=origins)
        return
    axis = _find_compound(terms, names)
    if axis is None:
        labels = [term.name if isinstance(term, Factor) else None for term in terms]
        yield Block(labels, list(origins), [term.size for term in terms], tensors)
        return
    before, term, after = terms[:axis], terms[axis], terms[axis + 1 :]
    if isinstance(term, Product):
        sizes = [f.size for f in term.factors]
        wide = [*origins[:axis], *[origins[axis]] * len(sizes), *origins[axis + 1 :]]
        views = (tensor.unflatten(axis, sizes) for tensor in tensors)
        yield from unroll([*before, *term.factors, *after], names, *views, origins=wide)
    else:
        assert isinstance(term, Sum)
        pieces = (tensor.split([part.size for part in term.parts], dim=axis) for tensor in tensors)
        for part, *views in zip(term.parts, *pieces, strict=True):
            yield from unroll([*before, part, *after], names, *views, origins=origins)


def roll(terms: Sequence[Term], names: Collection[str], blocks: Iterator[Tensor]) -> Tensor:
    """The whole tensor from its blocks, in the order in which `unroll` yields them."""
    if (home := _find_deciding_axis(terms, names)) is not None:
        count = len(terms[home].parts)  # type: ignore[union-attr]
        return torch.cat([roll(_choose(terms, home, number), names, blocks) for number in range(count)], dim=home)
    axis = _find_compound(terms, names)
    if axis is None:
        return next(blocks)
    before, term, after = terms[:axis], terms[axis], terms[axis + 1 :]
    if isinstance(term, Product):
        whole = roll([*before, *term.factors, *after], names, blocks)
        return whole.flatten(axis, axis + len(term.factors) - 1)
    assert isinstance(term, Sum)
    return torch.cat([roll([*before, part, *after], names, blocks) for part in term.parts], dim=axis)


def _find_deciding_axis(terms: Sequence[Term], names: Collection[str]) -> int | None:
    """The axis whose segments decide between the terms of another axis that has one of the names in it."""
    for axis, term in enumerate(terms):
        if isinstance(term, Switch) and any(f.name in names for f in factors(term)):
            return find_selector(terms, axis)
    return None


def _choose(terms: Sequence[Term], home: int, number: int) -> list[Term]:
    """The terms beside one segment of an axis."""
    chosen = list(terms)
    for axis, term in enumerate(terms):
        if axis == home or (isinstance(term, Switch) and find_selector(terms, axis) == home):
            chosen[axis] = term.parts[number]  # type: ignore[union-attr]
    return chosen


def _find_compound(terms: Sequence[Term], names: Collection[str]) -> int | None:
    """The first axis that is more than a factor and has one of the names in it."""
    for axis, term in enumerate(terms):
        if not isinstance(term, Factor | Switch) and any(f.name in names for f in factors(term)):
            return axis
    return None
