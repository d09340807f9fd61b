"""How the axes of a tensor are made of permutable parts.

An axis is a *term*: a factor, a product of terms (row-major, as ``view`` would flatten them) or a sum (a concatenation).
A layout is one term for each axis. Written as text it looks like einops, with ``+`` for concatenation::

    "h i"              two axes
    "o (h 49)"         the second axis is h blocks of 49 fixed entries: a flattened feature map
    "(h q)+(h k) i"    the first axis is two segments, laid end to end
    "q+k a|b"          the second axis is a beside the first segment of the first axis, and b beside the second
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factor:
    """A leaf: a named extent (a group if the symmetry frees it), or an anonymous one, which is never permuted.

    A hand-written name has size 0 until the layout is fitted to a shape.
    """

    size: int
    name: str | None = None


@dataclass(frozen=True)
class Product:
    """Terms multiplied, the first one outermost."""

    factors: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(f.size for f in self.factors)


@dataclass(frozen=True)
class Sum:
    """Terms laid end to end."""

    parts: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(p.size for p in self.parts)


@dataclass(frozen=True)
class Switch:
    """A whole axis that is another term beside each segment of another axis: the one that is a sum of as many parts."""

    parts: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of entries, the same beside each segment."""
        return self.parts[0].size


Term = Factor | Product | Sum | Switch
Layout = tuple[Term, ...]


def factors(term: Term) -> Iterator[Factor]:
    """Every leaf of a term, outermost and first in line first."""
    match term:
        case Factor():
            yield term
        case Product(children) | Sum(children) | Switch(children):
            for child in children:
                yield from factors(child)


def names(layout: Layout) -> set[str]:
    """The names that occur anywhere in a layout."""
    return {f.name for term in layout for f in factors(term) if f.name is not None}


# ---------------------------------------------------------------------------------------------------------------- text

_TOKEN = re.compile(r"[()+|]|[^\s()+|]+")


def write(layout: Layout) -> str:
    """A layout as text; `parse` reads it back.

    >>> write((Factor(3, "h"), Product((Factor(3, "h"), Factor(49)))))
    'h (h 49)'
    """
    return " ".join(_write(term, inside=False) for term in layout)


def _write(term: Term, inside: bool) -> str:
    match term:
        case Factor(size, name):
            return str(size) if name is None else name
        case Product(children):
            return "(" + " ".join(_write(c, inside=True) for c in children) + ")"
        case Sum(children):
            text = "+".join(_write(c, inside=False) for c in children)
            return f"({text})" if inside else text
        case Switch(children):
            return "|".join(_write(c, inside=False) for c in children)


def parse(pattern: str, sizes: Mapping[str, int] | None = None) -> Layout:
    """Read a layout from text. Names that `sizes` does not list get size 0 (not known yet).

    >>> parse("h (g 2)", {"h": 3, "g": 5})[1].size
    10
    """
    tokens = _TOKEN.findall(pattern)
    position = 0

    def fail(why: str) -> ValueError:
        return ValueError(f"cannot read the layout {pattern!r}: {why}; write it like 'o (h 49)' or 'a+b i'")

    def whole_axis() -> Term:
        nonlocal position
        parts = [axis()]
        while position < len(tokens) and tokens[position] == "|":
            position += 1
            parts.append(axis())
        return parts[0] if len(parts) == 1 else Switch(tuple(parts))

    def axis() -> Term:
        nonlocal position
        parts = [part()]
        while position < len(tokens) and tokens[position] == "+":
            position += 1
            parts.append(part())
        return parts[0] if len(parts) == 1 else Sum(tuple(parts))

    def part() -> Term:
        nonlocal position
        if position == len(tokens):
            raise fail("it ends too early")
        token = tokens[position]
        position += 1
        if token == "(":
            children = []
            while position < len(tokens) and tokens[position] != ")":
                children.append(axis())
            if position == len(tokens):
                raise fail("a parenthesis is not closed")
            position += 1
            return children[0] if len(children) == 1 else Product(tuple(children))
        if token in ")+|":
            raise fail(f"unexpected {token!r}")
        return Factor(int(token)) if token.isdigit() else Factor((sizes or {}).get(token, 0), token)

    layout = []
    while position < len(tokens):
        layout.append(whole_axis())
    for number, term in enumerate(layout):
        if isinstance(term, Switch) and find_selector(layout, number) is None:
            raise fail("a|b needs exactly one other axis of as many segments")
    return tuple(layout)


def find_selector(layout: Sequence[Term], axis: int) -> int | None:
    """The axis whose segments decide between the terms of a switch; None if there is none, or more than one."""
    count = len(layout[axis].parts)  # type: ignore[union-attr]
    found = [i for i, t in enumerate(layout) if i != axis and isinstance(t, Sum) and len(t.parts) == count]
    return found[0] if len(found) == 1 else None


def fit(term: Term, size: int, sizes: dict[str, int]) -> bool:
    """Learn the sizes of names from the extent of an axis: adds to `sizes`, returns whether all of the term is known.

    Raises:
        ValueError: if the term cannot have that extent.
    """
    match term:
        case Factor(fixed, name):
            known = fixed if name is None else sizes.setdefault(name, size)
        case Product(children):
            unknown = [c for c in children if not _known(c, sizes)]
            rest = math.prod(_extent(c, sizes) for c in children if c not in unknown)
            if len(unknown) > 1 or (unknown and (rest == 0 or size % rest)):
                return False
            known = rest
            if unknown:
                fit(unknown[0], size // rest, sizes)
                known = size
        case Sum(children):
            unknown = [c for c in children if not _known(c, sizes)]
            if len(set(unknown)) > 1:
                return False
            known = sum(_extent(c, sizes) for c in children if c not in unknown)
            if unknown and (size - known) % len(unknown) == 0 and size > known:
                fit(unknown[0], (size - known) // len(unknown), sizes)
                known = size
        case Switch(children):
            found = [fit(child, size, sizes) for child in children]
            return all(found)
    if known != size:
        raise ValueError(f"{_write(term, inside=False)!r} has {known} entries, the axis has {size}")
    return True


def _known(term: Term, sizes: Mapping[str, int]) -> bool:
    return all(f.name is None or f.name in sizes for f in factors(term))


def _extent(term: Term, sizes: Mapping[str, int]) -> int:
    match term:
        case Factor(size, name):
            return size if name is None else sizes[name]
        case Product(children):
            return math.prod(_extent(c, sizes) for c in children)
        case Sum(children):
            return sum(_extent(c, sizes) for c in children)
        case Switch(children):
            return _extent(children[0], sizes)


# ------------------------------------------------------------------------------------------------------------- indices

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
            for child, sub in zip(children, _unravel(children, position), strict=True):
                if name in covered(child):
                    return coordinate(child, name, sub)
        case Sum(children):
            result = torch.empty_like(position)
            for child, inside, sub in _segments(children, position):
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
            coordinates = _unravel(children, position)
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
            for child, inside, sub in _segments(children, position):
                local = {name: c.expand(shape)[inside] for name, c in context.items()}
                result[inside] = source(child, sub, local, lookup, parents) + offset
                offset += child.size
            return result
        case Switch():
            raise AssertionError("a switch is a whole axis")


def _unravel(children: tuple[Term, ...], position: Tensor) -> list[Tensor]:
    coordinates = []
    for child in reversed(children):
        coordinates.append(position % child.size)
        position = position // child.size
    return coordinates[::-1]


def _segments(children: tuple[Term, ...], position: Tensor) -> Iterator[tuple[Term, Tensor, Tensor]]:
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
