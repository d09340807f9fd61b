"""Axes whose structure is not known yet, found by unification with substitution.

While a graph is walked every axis is a term over *atoms*. An atom is an unknown permutable extent. Later operations refine
it: it is joined with another atom, bound to a product (``view`` splits 768 into 12 x 64) or to a sum (``chunk`` cuts 2304
into three), or pinned. Every refinement only makes the symmetry smaller, so the order of operations does not matter for
soundness.

An atom may have *parents*: other atoms that stand beside it wherever it occurs. Then it is a family, one permutation for
each element of the parent. Splitting an atom makes the inner part a child of the outer one. The parents are None until some
operation restricts them: an axis of a parameter may depend on any other axis of it until an operation says otherwise.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from onebasin.symmetries import Pin
from onebasin.symmetries.layout import Product, Sum

_numbers = itertools.count()
_changes = itertools.count()


def now() -> int:
    """A count of the changes of atoms: what changes later has a larger one."""
    return next(_changes)


class Atom:
    """An unknown extent.

    Attributes:
        size: number of entries.
        parents: the atoms it depends on; None while nothing is known about them.
        pin: why it cannot move, if it cannot.
        is_scrambled: whether an operation that pinned it did not say where its entries are in the result. Then nothing
            depends on it, because what stands beside it need not be aligned.
        link: the term it was found to be.
        coarse: for an atom that was cut, the outer factor of a later split that has one entry per segment: it tells the
            same segments apart.
        covers: for rows of which each belongs to one entry of another axis (a token to its expert), that axis: what stands
            beside the rows may depend on it.
        number: atoms are numbered in the order in which they are made.
        changed: when an attribute was set last, as `now` counts.
    """

    __slots__ = ("changed", "coarse", "covers", "is_scrambled", "link", "number", "parents", "pin", "size")

    def __init__(
        self, size: int, parents: frozenset[Atom] | None = None, pin: Pin | None = None, is_scrambled: bool = False
    ):
        self.size = size
        self.parents = frozenset() if pin else parents
        self.pin = pin
        self.is_scrambled = is_scrambled
        self.link: AxisTerm | None = None
        self.coarse: Atom | None = None
        self.covers: AxisTerm | None = None
        self.number = next(_numbers)

    def __setattr__(self, name: str, value: Any) -> None:
        # Pinned and scrambled atoms, and those with fewer parents, have the normal form they had: less is split by a cut.
        if name in ("link", "coarse") or (name == "parents" and value and not value <= self._known_parents):
            _thread.normal_forms.forget(self)
        elif value and name in ("is_scrambled", "covers"):
            _thread.normal_forms.forget_coordinates()
        object.__setattr__(self, name, value)
        object.__setattr__(self, "changed", next(_changes))

    @property
    def _known_parents(self) -> frozenset[Atom]:
        return parents_of(self) if hasattr(self, "parents") else frozenset()

    def __repr__(self) -> str:
        return f"{'!' if self.pin else ''}a{self.number}({self.size})"


@dataclass(frozen=True, eq=False)
class Uniform:
    """An extent along which a tensor is constant: it can be joined with any term of its size.

    Attributes:
        size: number of entries.
        repeats: whether a tensor that varies was repeated along it; otherwise the tensor was filled with one number.
    """

    size: int
    repeats: bool = False


@dataclass(frozen=True, eq=False)
class Piecewise:
    """A child of an atom that was cut into segments: it has a structure of its own in each segment of the selector."""

    selector: Atom
    parts: tuple[AxisTerm, ...]

    @property
    def size(self) -> int:
        """Number of entries, the same in each segment."""
        return self.parts[0].size


AxisTerm = Atom | Uniform | Piecewise | Product | Sum
Axes = tuple[AxisTerm, ...]
ONE = Product(())


# ------------------------------------------------------------------------------------------------------- normal form


class _NormalForms:
    """The normal forms of terms, each until an atom changes that it was found from.

    Forms are found from atoms and from forms of other terms, so a change is passed on from each to those found from it.
    Terms that are made on the way are kept and shared: to find a form again takes only the parts that have changed.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple, AxisTerm] = {}  # by kind and identities of the children, which it holds
        self._keys: dict[int, tuple[AxisTerm, int]] = {}  # of `identity`, by identity of a term, which it holds
        self._numbers: dict[tuple, int] = {}  # for the kind of a term and the keys of its children, its own key
        self._known: dict[int, tuple[AxisTerm, Any]] = {}  # holds the term too, so that its identity stays its own
        self._dependents: dict[int, set[int]] = {}  # by identity of an atom or key of a result: keys of what needs it
        self._current: list[int] = []  # keys of what is being found, outermost first
        self._outdated: set[int] = set()  # those of them whose forms read an atom that has changed since

        self.coordinates: dict[tuple[Any, int], tuple[AxisTerm, Any]] = {}  # see `of_coordinates`

    def clear(self) -> None:
        self.__init__()

    def forget_coordinates(self) -> None:
        """Forget what depends on which atoms are scrambled, because one is."""
        self.coordinates.clear()

    def share(self, kind: type, children: tuple[AxisTerm, ...], *selector: Atom) -> AxisTerm:
        """A term of this kind with these children; the same one as the last time."""
        key = (kind, *map(id, selector), *map(id, children))
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = kind(*selector, children)
        return found

    def number(self, term: AxisTerm) -> int:
        """See `identity`."""
        if isinstance(term, Atom):
            return term.number
        known = self._keys.get(id(term))
        if known is not None:
            return known[1]
        match term:
            case Product(children) | Sum(children) | Piecewise(_, children):
                key = (type(term), *map(self.number, children))
            case Uniform(size):
                key = (Uniform, size)
        number = self._numbers.setdefault(key, -1 - len(self._numbers))  # atoms have the numbers from zero
        self._keys[id(term)] = term, number
        return number

    def read(self, needed: AxisTerm) -> None:
        """Say that the form that is being found depends on an atom."""
        if self._current:
            self._dependents.setdefault(id(needed), set()).add(self._current[-1])

    def forget(self, atom: Atom) -> None:
        """Forget the forms that depend on an atom, because it changes."""
        pending = [id(atom)]
        while pending:
            for term in self._dependents.pop(pending.pop(), ()):
                self._known.pop(term, None)
                self._outdated.add(term)
                pending.append(term)

    def find(self, term: AxisTerm) -> AxisTerm:
        """The normal form of a term that is no atom."""
        return self._remember(id(term), term, _resolve)

    def find_leaves(self, term: AxisTerm) -> tuple[Atom | Uniform, ...]:
        """The leaves of a resolved term that is no atom."""
        return self._remember(~id(term), term, _list_leaves)

    def _remember(self, key: int, term: AxisTerm, compute: Callable[[Any], Any]) -> Any:
        if self._current:
            self._dependents.setdefault(key, set()).add(self._current[-1])
        known = self._known.get(key)
        if known is not None:
            return known[1]
        self._outdated.discard(key)
        self._current.append(key)
        try:
            result = compute(term)
        finally:
            self._current.pop()
        if key not in self._outdated:
            self._known[key] = term, result
        return result


class _Thread(threading.local):
    """Normal forms of the trace that runs in this thread."""

    def __init__(self) -> None:
        self.normal_forms = _NormalForms()


_thread = _Thread()


def forget_normal_forms() -> None:
    """Release what the trace that has ended in this thread held."""
    _thread.normal_forms.clear()


Found = TypeVar("Found")


def of_coordinates(function: Callable[[AxisTerm], Found]) -> Callable[[AxisTerm], Found]:
    """Remember what a function finds of a resolved term whose result depends on its atoms and on which are scrambled.

    Nothing is remembered of rows that belong to entries of another axis: that axis may change.
    """

    @functools.wraps(function)
    def find(term: AxisTerm) -> Found:
        known = _thread.normal_forms.coordinates
        found = known.get((find, id(term)))
        if found is None:
            result = function(term)
            if not (isinstance(term, Atom) or any(atom.covers is not None for atom in leaves(term))):
                known[find, id(term)] = term, result
            return result
        return found[1]

    return find


def resolve(term: AxisTerm) -> AxisTerm:
    """The normal form of a term: links followed, products and sums flattened, factors of size one dropped.

    A sum inside a product becomes a sum of products, (a + b) c -> a c + b c. This lets a child have a structure of its own
    in each segment of its parent.
    """
    forms = _thread.normal_forms
    while isinstance(term, Atom):
        if term.link is None:
            _split_by_cut_parent(term)
        if term.link is None:
            forms.read(term)
            return term
        term = term.link  # which does not change any more
    return forms.find(term)


def _resolve(term: AxisTerm) -> AxisTerm:
    match term:
        case Product():
            return _resolve_product(term)
        case Sum():
            parts = _flatten_sum(term)
            return parts[0] if len(parts) == 1 else _thread.normal_forms.share(Sum, tuple(parts))
        case Piecewise():
            parts = [resolve(p) for p in term.parts]
            varying = {identity(p): p for p in parts if not isinstance(p, Uniform)}
            if len(varying) > 1:
                return _thread.normal_forms.share(Piecewise, tuple(parts), term.selector)
            return next(iter(varying.values()), parts[0])  # what is uniform fits every term
    return term


def _flatten_sum(term: Sum) -> list[AxisTerm]:
    """The resolved parts of a sum. Sums in sums may be nested as deep as a loop is long: an atom is cut at every step."""
    parts: list[AxisTerm] = []
    pending = list(reversed(term.parts))
    while pending:
        part = follow_links(pending.pop())
        found = part.link if isinstance(part, Atom) and part.link is not None else resolve(part)
        if isinstance(found, Sum):
            pending += reversed(found.parts)
        else:
            parts.append(found)
    return parts


def identity(term: AxisTerm) -> int:
    """A key that two resolved terms share if they are equal."""
    return _thread.normal_forms.number(term)


def follow_links(term: AxisTerm) -> AxisTerm:
    """Follow links up to an atom that was cut, because a product needs to know the selector."""
    while isinstance(term, Atom):
        if term.link is None:
            _split_by_cut_parent(term)
        if term.link is None:
            _thread.normal_forms.read(term)
        if term.link is None or isinstance(term.link, Sum):
            return term
        term = term.link
    return resolve(term) if isinstance(term, Piecewise) else term


def _resolve_product(term: Product) -> AxisTerm:
    share = _thread.normal_forms.share
    flat: list[AxisTerm] = []
    pending = list(term.factors)
    while pending:
        factor = follow_links(pending.pop(0))
        if isinstance(factor, Product):
            pending = [*factor.factors, *pending]
        elif isinstance(factor, Uniform) and flat and isinstance(flat[-1], Uniform) and flat[-1].repeats == factor.repeats:
            flat[-1] = Uniform(flat[-1].size * factor.size, factor.repeats)
        elif factor.size != 1:
            flat.append(factor)
    for i, factor in enumerate(flat[:-1] if len(flat) > 1 else flat):
        total = factor.link if isinstance(factor, Atom) else factor
        if not isinstance(total, Sum):
            continue
        selector = factor if isinstance(factor, Atom) else None
        if selector and any(selects(f, selector) for f in flat[:i]):
            continue  # interleaved: an outer factor depends on this one
        spread = resolve(share(Sum, tuple(_spread(total, selector, flat[i + 1 :]))))
        return spread if i == 0 else share(Product, (*(resolve(f) for f in flat[:i]), spread))
    done = tuple(resolve(f) for f in flat)
    return done[0] if len(done) == 1 else share(Product, done)


def _spread(total: Sum, selector: Atom | None, others: list[AxisTerm]) -> Iterator[AxisTerm]:
    """Yield the parts of a sum, each times the other factors inside of it."""
    share = _thread.normal_forms.share
    for number, part in enumerate(total.parts):
        inside = tuple(restrict(f, selector, number) if selector else f for f in others)
        yield share(Product, (part, *inside) if part.size > 1 else inside)


def selects(term: AxisTerm, selector: Atom) -> bool:
    """Whether some part of a term is piecewise in the segments of the selector."""
    match term:
        case Piecewise():
            return same_selector(term.selector, selector) or any(selects(p, selector) for p in term.parts)
        case Product(children) | Sum(children):
            return any(selects(c, selector) for c in children)
    return False


def same_selector(first: Atom, second: Atom) -> bool:
    """Whether two cut atoms have the same segments: they were cut alike and joined, or one is a coarse form of the other."""
    return first is second or not forms(first).isdisjoint(forms(second))


def forms(selector: Atom) -> set[int]:
    """Keys of a cut atom and of its coarse forms, as they are now."""
    found = {identity(resolve(selector))}
    _thread.normal_forms.read(selector)
    while selector.coarse is not None:
        selector = selector.coarse
        found.add(identity(resolve(selector)))
        _thread.normal_forms.read(selector)
    return found


def restrict(term: AxisTerm, selector: Atom, part: int) -> AxisTerm:
    """A term inside one segment of a selector."""
    match term:
        case Atom():
            found = follow_links(term)
            return term if isinstance(found, Atom) else restrict(found, selector, part)
        case Piecewise():
            if same_selector(term.selector, selector) and len(term.parts) > part:
                return restrict(term.parts[part], selector, part)
            parts = tuple(restrict(p, selector, part) for p in term.parts)
            return _thread.normal_forms.share(Piecewise, parts, term.selector)
        case Product(children) | Sum(children):
            return _thread.normal_forms.share(type(term), tuple(restrict(c, selector, part) for c in children))
    return term


def _split_by_cut_parent(atom: Atom) -> None:
    """Make a child of an atom that was cut piecewise, with one part per segment."""
    if atom.pin or not atom.parents:
        return
    roots = parents_of(atom)
    for parent in sorted(roots, key=lambda p: p.number):
        if isinstance(parent.link, Sum):
            rest = roots - {parent}
            parts = []
            for number, part in enumerate(parent.link.parts):
                around = [part, *(restrict(other, parent, number) for other in rest)]
                parts.append(Atom(atom.size, frozenset(a for term in around for a in leaves(term) if a.size > 1)))
            atom.link = Piecewise(parent, tuple(parts))
            return


def parents_of(atom: Atom) -> frozenset[Atom]:
    """The parents as they are now, with links followed. A parent that was cut stays itself, because it is a selector."""
    found: set[Atom] = set()
    pending = list(atom.parents or ())
    while pending:
        parent = pending.pop()
        if parent.link is None:
            _thread.normal_forms.read(parent)
        match parent.link:
            case None | Sum() | Piecewise():
                if not parent.is_scrambled:
                    found.add(parent)
            case Atom():
                pending.append(parent.link)
            case Product(children):
                pending += [c for c in children if isinstance(c, Atom)]
    found.discard(atom)
    return frozenset(found)


def leaves(term: AxisTerm) -> list[Atom]:
    """The atoms of a term, outermost and leftmost first."""
    return [leaf for leaf in _leaves(term) if isinstance(leaf, Atom)]


def has_uniform_parts(term: AxisTerm) -> bool:
    """Whether a tensor is constant along a part of a term."""
    return any(isinstance(leaf, Uniform) for leaf in _leaves(term))


def has_piecewise_parts(term: AxisTerm) -> bool:
    """Whether a part of a term is another one in each segment of an atom that was cut."""
    match resolve(term):
        case Piecewise():
            return True
        case Product(children) | Sum(children):
            return any(map(has_piecewise_parts, children))
    return False


def is_filled(term: AxisTerm) -> bool:
    """Whether a part of a term is an extent that was filled with one number."""
    return any(isinstance(leaf, Uniform) and not leaf.repeats for leaf in _leaves(term))


def _leaves(term: AxisTerm) -> tuple[Atom | Uniform, ...]:
    found = resolve(term)
    return (found,) if isinstance(found, (Atom, Uniform)) else _thread.normal_forms.find_leaves(found)


def _list_leaves(term: AxisTerm) -> tuple[Atom | Uniform, ...]:
    return tuple(_iterate_leaves(term))


def _iterate_leaves(term: AxisTerm) -> Iterator[Atom | Uniform]:
    """Yield the leaves of a resolved term. Finding the form of one part may have split an atom of another."""
    match term:
        case Atom():
            found = resolve(term)
            if isinstance(found, Atom):
                yield found
            else:
                yield from _iterate_leaves(found)
        case Uniform():
            yield term
        case Product(children) | Sum(children) | Piecewise(_, children):
            for child in children:
                yield from _iterate_leaves(child)


def depth(term: AxisTerm) -> int:
    """How many atoms a term depends on. Parents are joined before their children."""
    match term:
        case Atom():
            return len(parents_of(term))
        case Piecewise():
            return 1 + max(depth(p) for p in term.parts)
        case Product(children) | Sum(children):
            return max((depth(c) for c in children), default=0)
    return 0
