"""Making terms equal, splitting, cutting and pinning them: every step only makes the symmetry smaller."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import reduce

from onebasin.symmetries import Pin
from onebasin.symmetries.layout import Product, Sum
from onebasin.tracing.axes.terms import (
    ONE,
    Atom,
    Axes,
    AxisTerm,
    Piecewise,
    Uniform,
    depth,
    follow_links,
    leaves,
    parents_of,
    resolve,
    restrict,
    same_selector,
)


def pin(term: AxisTerm, why: Pin) -> None:
    """Fix everything in a term. An atom keeps the first reason it was given."""
    for atom in list(leaves(term)):
        if atom.pin is None:
            atom.pin, atom.parents = why, frozenset()


def pinned(size: int, why: Pin) -> AxisTerm:
    """Make an extent that cannot move."""
    return ONE if size == 1 else Atom(size, pin=why)


def scramble(term: AxisTerm, why: Pin) -> None:
    """Fix everything in a term, and let nothing depend on it: its entries go to positions that no term describes."""
    pin(term, why)
    for atom in list(leaves(term)):
        atom.is_scrambled = True


def scrambled(size: int, why: Pin) -> AxisTerm:
    """Make an extent that cannot move, on which nothing can depend."""
    return ONE if size == 1 else Atom(size, pin=why, is_scrambled=True)


def join(first: AxisTerm, second: AxisTerm, why: Pin) -> AxisTerm:
    """Make two terms equal and return the result. What cannot be matched is pinned, with this reason."""
    first, second = resolve(first), resolve(second)
    if first is second or isinstance(second, Uniform):
        return first
    if isinstance(first, Uniform):
        return second
    if first.size != second.size:
        raise AssertionError(f"extents {first.size} and {second.size} cannot be joined")
    if isinstance(first, Atom) and isinstance(second, Atom):
        return _merge(first, second)
    if isinstance(first, Atom):
        return _bind(first, second, why)
    if isinstance(second, Atom):
        return _bind(second, first, why)
    if isinstance(first, Piecewise) or isinstance(second, Piecewise):
        return _join_cases(first, second, why)
    if isinstance(first, Sum) or isinstance(second, Sum):
        marks = sorted({*_boundaries(first), *_boundaries(second)})
        pieces = cut(first, marks), cut(second, marks)
        return resolve(Sum(tuple(join(a, b, why) for a, b in zip(*pieces, strict=True))))
    return _join_products(first, second, why)


def join_all(pairs: Iterable[tuple[AxisTerm, AxisTerm]], why: Pin) -> list[AxisTerm]:
    """Join pairs of terms, parents before children, and return the results in the order given."""
    pairs = list(pairs)
    order = sorted(range(len(pairs)), key=lambda i: max(depth(resolve(t)) for t in pairs[i]))
    results: dict[int, AxisTerm] = {i: join(*pairs[i], why) for i in order}
    return [results[i] for i in range(len(pairs))]


def _merge(kept: Atom, gone: Atom) -> Atom:
    if kept.parents is None or gone.parents is None:
        parents = gone.parents if kept.parents is None else kept.parents
    else:
        parents = parents_of(kept) & parents_of(gone)
    kept.pin = kept.pin or gone.pin
    kept.is_scrambled = kept.is_scrambled or gone.is_scrambled
    kept.parents = frozenset() if kept.pin else parents
    kept.covers = None  # the rows may belong to other entries there
    gone.link = kept
    return kept


def _bind(atom: Atom, term: AxisTerm, why: Pin) -> AxisTerm:
    if isinstance(term, Piecewise):  # the atom is no child of the selector, so all parts are equal
        return join(atom, reduce(lambda a, b: join(a, b, why), term.parts), why)
    term = _replace_uniform(term)
    if atom.pin:
        (scramble if atom.is_scrambled else pin)(term, atom.pin)
    elif atom.parents is not None:
        allowed = parents_of(atom)
        _limit(term, allowed, allowed.union(leaves(term)))
    atom.link = term
    return resolve(term)


def _replace_uniform(term: AxisTerm) -> AxisTerm:
    """Replace the uniform parts of a term by new atoms, because an axis that meets the term need not be uniform there."""
    match term:
        case Uniform(size):
            return Atom(size)
        case Product(children):
            return Product(tuple(map(_replace_uniform, children)))
        case Sum(children):
            return Sum(tuple(map(_replace_uniform, children)))
        case Piecewise(selector, children):
            return Piecewise(selector, tuple(map(_replace_uniform, children)))
    return term


def piecewise(selector: Atom, parts: Sequence[AxisTerm]) -> AxisTerm:
    """A term with one part per segment of a selector. Where a part is uniform in part, it gets atoms: see `join_parts`."""
    found = [resolve(part) for part in parts]
    return Piecewise(selector, tuple(part if isinstance(part, Uniform) else _replace_uniform(part) for part in found))


def join_parts(term: Piecewise, why: Pin) -> None:
    """Make the parts of a piecewise term equal. Parts that cannot be matched are pinned."""
    reduce(lambda a, b: join(a, b, why), term.parts)
    if isinstance(resolve(term), Piecewise):
        scramble(term, why)


def is_fixed(term: AxisTerm) -> bool:
    """Whether everything in a term is pinned."""
    return all(atom.pin for atom in leaves(term))


def _limit(term: AxisTerm, outer: frozenset[Atom], around: frozenset[Atom]) -> None:
    match term:
        case Atom():
            term.parents = outer if term.parents is None else parents_of(term) & around
        case Product(children):
            for child in children:
                _limit(child, outer, around)
                outer = outer.union(leaves(child))
        case Sum(children) | Piecewise(_, children):
            for child in children:
                _limit(child, outer, around)


def _join_cases(first: AxisTerm, second: AxisTerm, why: Pin) -> AxisTerm:
    if isinstance(first, Piecewise) and isinstance(second, Piecewise) and same_selector(first.selector, second.selector):
        return resolve(Piecewise(first.selector, tuple(join_all(zip(first.parts, second.parts, strict=True), why))))
    if not isinstance(first, Piecewise):
        first, second = second, first
    assert isinstance(first, Piecewise)
    return join(reduce(lambda a, b: join(a, b, why), first.parts), second, why)


def _join_products(first: AxisTerm, second: AxisTerm, why: Pin) -> AxisTerm:
    assert isinstance(first, Product)
    assert isinstance(second, Product)
    left, right = list(first.factors), list(second.factors)
    pairs: list[tuple[AxisTerm, AxisTerm]] = []
    while left and right:
        a, b = left.pop(), right.pop()
        inner = math.gcd(a.size, b.size)
        if inner != min(a.size, b.size):
            break
        halves_a, halves_b = split(a, inner), split(b, inner)
        if halves_a is None or halves_b is None:
            break
        (outer_a, a), (outer_b, b) = halves_a, halves_b
        left += [outer_a] if outer_a.size > 1 else []
        right += [outer_b] if outer_b.size > 1 else []
        pairs.append((a, b))
    else:
        return resolve(Product(tuple(join_all(pairs[::-1], why))))
    scramble(first, why)
    scramble(second, why)
    return scrambled(first.size, why)


def _boundaries(term: AxisTerm) -> Sequence[int]:
    if not isinstance(term, Sum):
        return ()
    return list(itertools.accumulate(p.size for p in term.parts))[:-1]


def split(term: AxisTerm, inner: int) -> tuple[AxisTerm, AxisTerm] | None:
    """Split a term into a product (outer, inner) with this inner extent; None if its structure does not allow that."""
    origin, term = follow_links(term), resolve(term)
    if inner == 1 or inner == term.size:
        return (term, ONE) if inner == 1 else (ONE, term)
    if term.size % inner:
        return None
    match term:
        case Atom():
            outside = Atom(term.size // inner, term.parents, term.pin, term.is_scrambled)
            within = Atom(inner, None if term.parents is None else term.parents | {outside}, term.pin, term.is_scrambled)
            term.link = Product((outside, within))
            return outside, within
        case Uniform():
            return Uniform(term.size // inner, term.repeats), Uniform(inner, term.repeats)
        case Product(children):
            return _split_product(list(children), inner)
        case Sum(children):
            halves = [split(c, inner) for c in children]
            if any(h is None for h in halves):
                return None
            outers = [h[0] if h[0].size > 1 else Atom(1) for h in halves if h]
            selector = Atom(term.size // inner)
            selector.link = Sum(tuple(outers))
            if isinstance(origin, Atom) and isinstance(origin.link, Sum) and selector.size == len(origin.link.parts):
                origin.coarse = selector
            return selector, piecewise(selector, [h[1] for h in halves if h])
        case Piecewise(selector, children):
            halves = [split(c, inner) for c in children]
            if any(h is None for h in halves):
                return None
            outside, within = (piecewise(selector, [h[i] for h in halves if h]) for i in (0, 1))
            return outside, within
    return None


def split_segments(term: AxisTerm, inner: int) -> tuple[AxisTerm, AxisTerm] | None:
    """Split a concatenation into a product (outer, inner) across its parts; None for anything else, and for many entries.

    Each outer entry is a segment with a structure of its own, as in a stack of tensors: 8 + 4 entries as (3, 4) are the two
    halves of the first part, and the second.
    """
    term = resolve(term)
    if not isinstance(term, Sum) or term.size % inner or term.size // inner > _MAX_SEGMENTS:
        return None
    pieces = cut(term, range(inner, term.size, inner))
    selector = Atom(len(pieces))
    selector.link = Sum(tuple(Atom(1) for _ in pieces))
    return selector, piecewise(selector, pieces)


_MAX_SEGMENTS = 64


def _split_product(factors: list[AxisTerm], inner: int) -> tuple[AxisTerm, AxisTerm] | None:
    within: list[AxisTerm] = []
    while inner > 1:
        factor = factors.pop()
        take = math.gcd(factor.size, inner)
        if take != min(factor.size, inner):
            return None
        halves = split(factor, take)
        if halves is None:
            return None
        if halves[0].size > 1:
            factors.append(halves[0])
        within.insert(0, halves[1])
        inner //= take
    return Product(tuple(factors)), Product(tuple(within))


def cut(term: AxisTerm, marks: Iterable[int]) -> list[AxisTerm]:
    """Cut a term at these positions into consecutive segments."""
    term = resolve(term)
    size = term.size  # of a sum, it is added up
    marks = sorted({m for m in marks if 0 < m < size})
    if not marks:
        return [term]
    lengths = [b - a for a, b in itertools.pairwise([0, *marks, size])]
    match term:
        case Uniform():
            return [Uniform(n, term.repeats) for n in lengths]
        case Atom():
            parts = [Atom(n, term.parents, term.pin, term.is_scrambled) for n in lengths]
            term.link = Sum(tuple(parts))
            return list(parts)
        case Sum(children):
            return _cut_sum(children, marks)
        case Piecewise(selector, children):
            columns = zip(*(cut(c, marks) for c in children), strict=True)
            return [Piecewise(selector, column) for column in columns]
        case Product(children):
            return _cut_product(term, children, marks)
    raise AssertionError(term)


def _cut_sum(children: tuple[AxisTerm, ...], marks: list[int]) -> list[AxisTerm]:
    segments: list[list[AxisTerm]] = [[]]
    start, boundaries = 0, set(marks)
    for child in children:
        inside = marks[bisect.bisect(marks, start) : bisect.bisect(marks, start + child.size)]
        for piece in cut(child, [m - start for m in inside]) if inside else [resolve(child)]:
            if start in boundaries:
                segments.append([])
            segments[-1].append(piece)
            start += piece.size
    return [s[0] if len(s) == 1 else Sum(tuple(s)) for s in segments]


def _cut_product(term: Product, children: tuple[AxisTerm, ...], marks: list[int]) -> list[AxisTerm]:
    """Cut the outermost factor. Where a position falls inside one of its blocks, cut that block out and cut it too."""
    first, rest = children[0], children[1:]
    block = term.size // first.size
    blocks = sorted({b for m in marks for b in (m // block, -(-m // block))})
    if isinstance(first, (Uniform, Piecewise)):  # the parts of an inner factor are cut alike
        spread = Sum(tuple(Product((piece, *rest)) for piece in cut(first, blocks)))
    elif isinstance(first, Atom):
        cut(first, blocks)
        spread = resolve(term)
    else:
        spread = None
    if not isinstance(spread, Sum):  # an outer factor that depends on an inner one
        why = Pin("an interleaved axis is cut")
        scramble(term, why)
        return [scrambled(b - a, why) for a, b in itertools.pairwise([0, *marks, term.size])]
    return _cut_sum(spread.parts, marks)


def _make_piecewise(axis: AxisTerm, selector: Atom) -> None:
    """Let an axis of a parameter, which may depend on any other axis of it, be another one beside each segment of one."""
    atom = follow_links(axis)
    if isinstance(atom, Atom) and atom.link is None and atom.parents is None and not atom.pin:
        assert isinstance(selector.link, Sum)
        atom.link = Piecewise(selector, tuple(Atom(atom.size) for _ in selector.link.parts))


def narrow(axes: Axes, dim: int, start: int, length: int) -> Axes:
    """The axes of a tensor after axis `dim` is cut down to a range; children of that axis keep the part of that range."""
    pieces = cut(axes[dim], [start, start + length])
    others = list(axes)
    selector, offset = follow_links(axes[dim]), start
    while isinstance(selector, Atom) and isinstance(selector.link, Sum):
        number = 0
        while offset >= selector.link.parts[number].size:
            offset -= selector.link.parts[number].size
            number += 1
        part = selector.link.parts[number]
        if offset + length > part.size:
            break
        for axis in (*others[:dim], *others[dim + 1 :]):
            _make_piecewise(axis, selector)
        others = [restrict(axis, selector, number) for axis in others]
        selector = follow_links(part)
    begin = 0
    for piece in pieces:
        if begin == start:
            return (*others[:dim], piece if piece.size > 1 else ONE, *others[dim + 1 :])
        begin += piece.size
    raise AssertionError(f"an empty range of an axis of {axes[dim].size}")
