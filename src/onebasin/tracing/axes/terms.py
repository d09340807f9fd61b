"""Axes whose structure is not known yet: unification with substitution.

While a graph is walked every axis is a term over *atoms*. An atom is an unknown permutable extent. Later operations refine
it: it is joined with another atom, bound to a product (``view`` splits 768 into 12 x 64) or to a sum (``chunk`` cuts 2304
into three), or pinned. Every refinement only makes the symmetry smaller, so the order of operations does not matter for
soundness.

An atom may have *parents*: other atoms that stand beside it wherever it occurs, so that it is a family, one permutation for
each element of the parent. Splitting an atom makes the inner part a child of the outer one. `None` stands for "not asked
yet": an axis of a parameter may depend on any other axis of it until an operation says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from onebasin.symmetries import Pin
from onebasin.symmetries.layout import Product, Sum

_births = itertools.count()


class Atom:
    """An unknown extent. `link` is what it turned out to be, `pin` why it cannot move.

    An atom that was cut may be split later so that its outer factor has one entry for each segment: that is its `coarse`
    form, which tells the same segments apart.
    """

    __slots__ = ("birth", "coarse", "link", "parents", "pin", "size")

    def __init__(self, size: int, parents: frozenset[Atom] | None = None, pin: Pin | None = None):
        self.size = size
        self.parents = frozenset() if pin else parents
        self.pin = pin
        self.link: Unknown | None = None
        self.coarse: Atom | None = None
        self.birth = next(_births)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            _normal_forms.clear()
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{'!' if self.pin else ''}a{self.birth}({self.size})"


@dataclass(frozen=True, eq=False)
class Same:
    """An extent along which a tensor is constant (broadcast, filled): it fits whatever it meets."""

    size: int


@dataclass(frozen=True, eq=False)
class Cases:
    """A child of an atom that was cut into segments: in each segment of the selector, a structure of its own."""

    selector: Atom
    parts: tuple[Unknown, ...]

    @property
    def size(self) -> int:
        """Number of entries, the same in each case."""
        return self.parts[0].size


Unknown = Atom | Same | Cases | Product | Sum
Axes = tuple[Unknown, ...]
ONE = Product(())


# ------------------------------------------------------------------------------------------------------- normal form


class _NormalForms:
    """What terms were resolved to since an atom last changed; most are asked for hundreds of times between two changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Unknown, Unknown]] = {}  # with the term itself, so that its identity stays its own
        self._num_changes = 0

    def clear(self) -> None:
        self._known.clear()
        self._num_changes += 1

    def find(self, term: Unknown) -> Unknown:
        if id(term) not in self._known:
            before = self._num_changes
            result = _resolve(term)
            if self._num_changes != before:  # resolving has changed an atom, maybe one that was looked at before
                return result
            self._known[id(term)] = term, result
        return self._known[id(term)][1]


_normal_forms = _NormalForms()


def resolve(term: Unknown) -> Unknown:
    """The normal form of a term: links followed, products and sums flattened, factors of size one dropped.

    A sum inside a product is moved to its last place, (a + b) c -> a c + b c, which is what lets a child take a structure
    of its own in each segment of its parent.
    """
    while isinstance(term, Atom):
        if term.link is None:
            _split_by_cut_parent(term)
        if term.link is None:
            return term
        term = term.link
    return _normal_forms.find(term)


def _resolve(term: Unknown) -> Unknown:
    match term:
        case Product():
            return _resolve_product(term)
        case Sum():
            parts: list[Unknown] = []
            for part in map(resolve, term.parts):
                parts.extend(part.parts if isinstance(part, Sum) else [part])
            return parts[0] if len(parts) == 1 else Sum(tuple(parts))
        case Cases():
            parts = [resolve(p) for p in term.parts]
            same = all(identity(p) == identity(parts[0]) for p in parts[1:])
            return parts[0] if same else Cases(term.selector, tuple(parts))
    return term


def identity(term: Unknown) -> tuple:
    """A key that is equal for equal resolved terms."""
    match term:
        case Product(children) | Sum(children) | Cases(_, children):
            return (type(term).__name__, *map(identity, children))
        case Same(size):
            return ("Same", size)
    return (id(term),)


def head(term: Unknown) -> Unknown:
    """Follow links, but stop at an atom that was cut: a product needs to know the selector."""
    while isinstance(term, Atom):
        if term.link is None:
            _split_by_cut_parent(term)
        if term.link is None or isinstance(term.link, Sum):
            return term
        term = term.link
    return resolve(term) if isinstance(term, Cases) else term


def _resolve_product(term: Product) -> Unknown:
    flat: list[Unknown] = []
    pending = list(term.factors)
    while pending:
        factor = head(pending.pop(0))
        if isinstance(factor, Product):
            pending = [*factor.factors, *pending]
        elif factor.size != 1:
            flat.append(factor)
    for i, factor in enumerate(flat[:-1] if len(flat) > 1 else flat):
        total = factor.link if isinstance(factor, Atom) else factor
        if not isinstance(total, Sum):
            continue
        selector = factor if isinstance(factor, Atom) else None
        if selector and any(selects(f, selector) for f in flat[:i]):
            continue  # interleaved: an outer factor depends on this one
        inner = [
            Product((part, *(restrict(f, selector, n) if selector else f for f in flat[i + 1 :])))
            for n, part in enumerate(total.parts)
        ]
        spread = resolve(Sum(tuple(inner)))
        return spread if i == 0 else Product((*(resolve(f) for f in flat[:i]), spread))
    done = [resolve(f) for f in flat]
    return done[0] if len(done) == 1 else Product(tuple(done))


def selects(term: Unknown, selector: Atom) -> bool:
    """Whether some part of a term has a case for each segment of the selector."""
    match term:
        case Cases():
            return same_selector(term.selector, selector) or any(selects(p, selector) for p in term.parts)
        case Product(children) | Sum(children):
            return any(selects(c, selector) for c in children)
    return False


def same_selector(first: Atom, second: Atom) -> bool:
    """Whether two cut atoms tell the same segments apart: cut alike and joined since, or one a coarse form of the other."""
    return first is second or not forms(first).isdisjoint(forms(second))


def forms(selector: Atom) -> set[tuple]:
    """What a cut atom and its coarse forms look like now."""
    found = {identity(resolve(selector))}
    while selector.coarse is not None:
        selector = selector.coarse
        found.add(identity(resolve(selector)))
    return found


def restrict(term: Unknown, selector: Atom, part: int) -> Unknown:
    """A term inside one segment of a selector."""
    match term:
        case Atom():
            found = head(term)
            return term if isinstance(found, Atom) else restrict(found, selector, part)
        case Cases():
            if same_selector(term.selector, selector) and len(term.parts) > part:
                return restrict(term.parts[part], selector, part)
            return Cases(term.selector, tuple(restrict(p, selector, part) for p in term.parts))
        case Product(children):
            return Product(tuple(restrict(c, selector, part) for c in children))
        case Sum(children):
            return Sum(tuple(restrict(c, selector, part) for c in children))
    return term


def _split_by_cut_parent(atom: Atom) -> None:
    """Give a child of an atom that was cut a case for each segment."""
    if atom.pin or not atom.parents:
        return
    roots = parents_of(atom)
    for parent in sorted(roots, key=lambda p: p.birth):
        if isinstance(parent.link, Sum):
            rest = roots - {parent}
            cases = []
            for number, part in enumerate(parent.link.parts):
                around = [part, *(restrict(other, parent, number) for other in rest)]
                cases.append(Atom(atom.size, frozenset(a for term in around for a in leaves(term) if a.size > 1)))
            atom.link = Cases(parent, tuple(cases))
            return


def parents_of(atom: Atom) -> frozenset[Atom]:
    """The parents as they are now: links followed; an atom that was cut stays, as the selector."""
    found: set[Atom] = set()
    pending = list(atom.parents or ())
    while pending:
        parent = pending.pop()
        match parent.link:
            case None | Sum() | Cases():
                found.add(parent)
            case Atom():
                pending.append(parent.link)
            case Product(children):
                pending += [c for c in children if isinstance(c, Atom)]
    found.discard(atom)
    return frozenset(found)


def leaves(term: Unknown) -> Iterator[Atom]:
    """The atoms of a resolved term, outermost and first in line first."""
    match resolve(term):
        case Atom() as atom:
            yield atom
        case Product(children) | Sum(children) | Cases(_, children):
            for child in children:
                yield from leaves(child)


def depth(term: Unknown) -> int:
    """How many atoms a term depends on: parents are joined before their children."""
    match term:
        case Atom():
            return len(parents_of(term))
        case Cases():
            return 1 + max(depth(p) for p in term.parts)
        case Product(children) | Sum(children):
            return max((depth(c) for c in children), default=0)
    return 0
