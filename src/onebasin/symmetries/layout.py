"""How the axes of a tensor are made of permutable parts.

An axis is a *term*: a factor, a product of terms (row-major, as ``view`` would flatten them) or a sum (a concatenation).
A layout is one term for each axis. Written as text it looks like einops, with ``+`` for concatenation::

    "h i"              two axes
    "o (h 49)"         the second axis is h blocks of 49 fixed entries: a flattened feature map
    "(h q)+(h k) i"    the first axis is two segments, laid end to end
    "q+k a|b"          the second axis is a beside the first segment of the first axis, and b beside the second
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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

    @functools.cached_property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(f.size for f in self.factors)


@dataclass(frozen=True)
class Sum:
    """Terms laid end to end."""

    parts: tuple[Any, ...]

    @functools.cached_property
    def size(self) -> int:
        """Number of entries."""
        return sum(p.size for p in self.parts)


@dataclass(frozen=True)
class Switch:
    """A whole axis that is another term beside each segment of another axis: the one that is a sum of as many parts."""

    parts: tuple[Any, ...]

    @functools.cached_property
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
