"""From a layout and permutations to the source index of every entry along each axis of a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from onebasin.symmetries.layout import Factor, Layout, Product, Sum, Switch, Term, factors, find_selector, write

Lookup = Mapping[str, Tensor]
"""For each group, its permutation(s): (*parent sizes, n), long."""


def covered(term: Term) -> set[str]:
    """The names that have a coordinate at every position of a term."""
    match term:
        case Factor(_, name):
            return set() if name is None else {name}
        case Product(children):
            return set().union(*(covered(c) for c in children))
        case Sum(children):
            return set.intersection(*(covered(c) for c in children))
        case Switch():
            return set()  # nothing depends on what differs beside each segment


def find_parent(layout: Layout, axis: int, siblings: set[str], parent: str) -> int | None:
    """The axis from which a dependent factor reads its parent's coordinate: its own if the parent is a sibling there.

    Returns None if no axis, or more than one other axis, has a coordinate of the parent everywhere.
    """
    if parent in siblings:
        return axis
    others = [i for i, term in enumerate(layout) if i != axis and parent in covered(term)]
    return others[0] if len(others) == 1 else None


def coordinate(term: Term, name: str, position: Tensor) -> Tensor:
    """The coordinate of the factor `name` at each position of a term that is covered by it."""
    match term:
        case Product(children):
            for child, sub in zip(children, unravel(children, position), strict=True):
                if name in covered(child):
                    return coordinate(child, name, sub)
        case Sum(children):
            result = torch.empty_like(position)
            for child, inside, sub in segments(children, position):
                result[inside] = coordinate(child, name, sub)
            return result
    return position


def source(
    term: Term,
    position: Tensor,
    context: Mapping[str, Tensor],
    lookup: Lookup,
    parents: Mapping[str, tuple[str, ...]],
) -> Tensor:
    """Where each target position of a term comes from: new[h, d] = old[s[h], p[h][d]].

    Args:
        term: the term.
        position: target positions, of any shape.
        context: coordinates of the parents that live outside the term, broadcastable to `position`.
        lookup: the permutations.
        parents: for each group, the names of its parents, outermost first.
    """
    match term:
        case Factor(_, name):
            if name is None or name not in lookup:
                return position
            return lookup[name][(*(context[p] for p in parents[name]), position)]
        case Product(children):
            coordinates = unravel(children, position)
            inside = dict(context)
            for child, sub in zip(children, coordinates, strict=True):
                inside.update({name: coordinate(child, name, sub) for name in covered(child)})
            result = torch.zeros_like(position)
            for child, sub in zip(children, coordinates, strict=True):
                result = result * child.size + source(child, sub, inside, lookup, parents)
            return result
        case Sum(children):
            shape = torch.broadcast_shapes(position.shape, *(c.shape for c in context.values()))
            position = position.expand(shape)
            result, offset = torch.empty_like(position), 0
            for child, inside, sub in segments(children, position):
                local = {name: c.expand(shape)[inside] for name, c in context.items()}
                result[inside] = source(child, sub, local, lookup, parents) + offset
                offset += child.size
            return result
        case Switch():
            raise AssertionError("a switch is a whole axis")


def unravel(children: tuple[Term, ...], position: Tensor) -> list[Tensor]:
    """The coordinates of positions of a product, one for each of its factors."""
    coordinates = []
    for child in reversed(children):
        coordinates.append(position % child.size)
        position = position // child.size
    return coordinates[::-1]


def segments(children: tuple[Term, ...], position: Tensor) -> Iterator[tuple[Term, Tensor, Tensor]]:
    """Yield the parts of a sum, each with which positions lie inside it and where there."""
    start = 0
    for child in children:
        inside = (position >= start) & (position < start + child.size)
        yield child, inside, position[inside] - start
        start += child.size


Cache = dict[tuple[Term, str], Tensor]
"""Indices that were computed before, by term and device."""


def gather_indices(
    layout: Layout,
    lookup: Lookup,
    parents: Mapping[str, tuple[str, ...]],
    device: torch.device | str = "cpu",
    cache: Cache | None = None,
) -> tuple[Tensor | None, ...]:
    """For each axis the source index of every target position; None where the axis stays as it is.

    An index is one-dimensional, unless the axis depends on other axes of the tensor (the inputs of a grouped
    convolution depend on its outputs): then it spans those axes too, ready for advanced indexing.
    """
    result: list[Tensor | None] = []
    for axis, term in enumerate(layout):
        if cache is not None and (term, str(device)) in cache:
            result.append(cache[term, str(device)])
            continue
        if not any(f.name in lookup for f in factors(term)):
            result.append(None)
            continue
        if isinstance(term, Switch):
            result.append(_switch_indices(layout, axis, term, lookup, parents).to(device))
            continue
        context = {}
        for name, siblings in dependencies(term, parents):
            home = find_parent(layout, axis, siblings, name)
            assert home is not None, f"{write(layout)}: {name} is not in reach of axis {axis}"
            if home != axis:
                context[name] = _along(coordinate(layout[home], name, torch.arange(layout[home].size)), home, len(layout))
        position = torch.arange(term.size)
        if context:
            position = _along(position, axis, len(layout))
        index = source(term, position, context, lookup, parents)
        index = (index.reshape(-1) if index.numel() == term.size else index).to(device)
        if cache is not None and not context:
            cache[term, str(device)] = index
        result.append(index)
    return tuple(result)


def _switch_indices(
    layout: Layout, axis: int, term: Switch, lookup: Lookup, parents: Mapping[str, tuple[str, ...]]
) -> Tensor:
    """The source index along a switch, for each position of the axis that decides between its terms."""
    home = find_selector(layout, axis)
    assert home is not None, f"{write(layout)}: nothing decides between the terms of axis {axis}"
    selector, position = layout[home], torch.arange(term.size)
    assert isinstance(selector, Sum)
    rows = torch.stack([source(part, position, {}, lookup, parents) for part in term.parts])
    numbers = torch.arange(len(term.parts)).repeat_interleave(torch.tensor([part.size for part in selector.parts]))
    index = rows[numbers] if home < axis else rows[numbers].T
    return index.view([n.size if i in (home, axis) else 1 for i, n in enumerate(layout)])


def dependencies(
    term: Term, parents: Mapping[str, tuple[str, ...]], siblings: frozenset[str] = frozenset()
) -> Iterator[tuple[str, set[str]]]:
    """Every parent that a factor of the term needs, with the names that stand beside that factor in its product."""
    match term:
        case Factor(_, name):
            for parent in parents.get(name or "", ()):
                yield parent, set(siblings)
        case Product(children):
            inside = siblings.union(*(covered(c) for c in children))
            for child in children:
                yield from dependencies(child, parents, inside)
        case Sum(children) | Switch(children):
            for child in children:
                yield from dependencies(child, parents, siblings)


def _along(index: Tensor, axis: int, num_axes: int) -> Tensor:
    return index.view([-1 if i == axis else 1 for i in range(num_axes)])
