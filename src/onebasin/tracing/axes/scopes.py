"""Which atoms a child may depend on: those that stand beside it in every tensor, and are aligned in every operation.

A *scope* is a tuple of axes that one operation reads side by side: the axes of a tensor, or the axes that two operands of a
contraction share. A child that lacks one of its parents in some scope is the same for all elements of that parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onebasin.symmetries import Pin
from onebasin.symmetries.layout import Product, Sum
from onebasin.tracing.axes.terms import (
    Atom,
    Axes,
    AxisTerm,
    Piecewise,
    follow_links,
    forms,
    identity,
    leaves,
    now,
    of_coordinates,
    parents_of,
    resolve,
    restrict,
    selects,
)
from onebasin.tracing.axes.unification import is_fixed, join_parts

_NOT_ALIGNED = Pin("segments of an axis are treated alike")

Context = tuple[Atom | Piecewise, frozenset[Atom], frozenset[int]]
"""An atom or a piecewise term of a scope, the atoms that it may depend on there, and the keys of the terms beside it."""


def enforce(axes: Axes) -> bool:
    """Remove from every child in a scope the parents that are not in it. Returns whether anything changed."""
    if all(_is_independent(resolve(axis)) for axis in axes):
        return False
    changed = False
    for found, context, beside in list(_iterate_contexts(axes)):
        if isinstance(found, Piecewise):
            if forms(found.selector).isdisjoint(beside) and not is_fixed(found):
                join_parts(found, _NOT_ALIGNED)
                return True
        elif found.link is None and found.parents is None and not context:
            found.parents = context  # it stands alone here, so it depends on nothing anywhere
        elif found.link is None and found.parents:
            kept = _close(parents_of(found) & context)
            if kept != found.parents:
                changed = changed or kept != parents_of(found)
                found.parents = kept
    return changed


def solve_scopes(scopes: Iterable[Axes], settled: dict[int, Settled] | None = None) -> None:
    """Enforce all scopes until nothing changes, then choose the parents of the atoms that no scope restricted.

    Such an atom depends on all that stands beside it everywhere.

    Args:
        scopes: the scopes.
        settled: by the identity of a scope, what it was when it was last enforced; this is updated.
    """
    settled = {} if settled is None else settled
    scopes = list({tuple(identity(resolve(axis)) for axis in scope): scope for scope in scopes}.values())
    _enforce_all(scopes, settled)
    contexts: dict[Atom, frozenset[Atom]] = {}
    for scope in scopes:
        if all(atom.parents is not None for axis in scope for atom in leaves(axis)):
            continue
        for found, context, _ in _iterate_contexts(scope):
            if isinstance(found, Atom) and found.parents is None:
                contexts[found] = contexts.get(found, context) & context
    for atom in sorted(contexts, key=lambda a: a.number):
        known = frozenset(p for p in contexts[atom] if p.size > 1 and p.parents is not None)
        atom.parents = _close(frozenset(p for p in known if atom not in _ancestors(p)))
    _enforce_all(scopes, settled)


def _enforce_all(scopes: list[Axes], settled: dict[int, Settled]) -> None:
    """Enforce scopes until nothing changes.

    This ends, because a measure falls with every change: the multiset of the free atoms, each with its size and the sizes of
    its parents, in lexicographic order. A change drops a parent, merges two atoms, pins one, or replaces one by atoms that
    are smaller, or have smaller parents. A piecewise term whose parts cannot be made equal is pinned, and not visited again.
    """
    changed = True
    while changed:
        changed = False
        for scope in scopes:
            if id(scope) in settled and settled[id(scope)].is_current():
                continue
            time = now()
            changed = enforce(scope) or changed
            settled[id(scope)] = Settled(scope, time)


class Settled:
    """What a scope was when it was enforced: as long as that is the same, enforcing it again changes nothing.

    Args:
        scope: the axes.
        time: before they were enforced.
    """

    def __init__(self, scope: Axes, time: int):
        self.scope = scope  # held, so that its identity stays its own
        self._time = time
        self._atoms: set[Atom] = set()  # that it depends on
        terms = {id(term): term for axis in scope for term in _iterate_selectors(resolve(axis))}
        self._forms = [(term, resolve(term)) for term in (*scope, *terms.values())]
        pending = [atom for term, form in self._forms for atom in (*leaves(form), follow_links(term), term)]
        while pending:
            atom = pending.pop()
            if not isinstance(atom, Atom) or atom in self._atoms:
                continue
            self._atoms.add(atom)
            pending += [*(atom.parents or ()), atom.link, atom.coarse]
            if atom.covers is not None:
                pending += leaves(atom.covers)
            if isinstance(atom.link, Product):
                pending += atom.link.factors

    def is_current(self) -> bool:
        """Whether nothing that it depends on has changed since."""
        if any(atom.changed > self._time for atom in self._atoms):
            return False
        return all(resolve(term) is form for term, form in self._forms)


def _iterate_selectors(term: AxisTerm) -> Iterator[Atom]:
    """Yield the selectors of the piecewise parts of a resolved term."""
    match term:
        case Piecewise(selector, children):
            yield selector
            for child in children:
                yield from _iterate_selectors(child)
        case Product(children) | Sum(children):
            for child in children:
                yield from _iterate_selectors(child)


def _is_independent(term: AxisTerm) -> bool:
    """Whether no part of a resolved term has parents, so that no scope can remove any."""
    match term:
        case Atom():
            return term.parents is not None and not term.parents
        case Product(children) | Sum(children):
            return all(map(_is_independent, children))
    return not isinstance(term, Piecewise)


def _iterate_contexts(axes: Axes) -> Iterator[Context]:
    for branch in _branches(axes):
        terms = [resolve(a) for a in branch]
        dependent = [i for i, term in enumerate(terms) if not _is_independent(term)]
        if not dependent:
            continue
        covers, counts = [_covered(t) for t in terms], [_count(t) for t in terms]
        total = _add(counts)
        for i in dependent:
            outside = frozenset(a for j, cover in enumerate(covers) if j != i for a in cover if total[a] == 1)
            beside = frozenset(identity(t) for j, t in enumerate(terms) if j != i)
            elsewhere = frozenset(a for a, n in total.items() if n > counts[i].get(a, 0))
            repeated = frozenset(a for a, n in counts[i].items() if n > 1)
            yield from _visit(terms[i], frozenset(), outside, beside, (repeated, elsewhere))


def _branches(axes: Axes) -> Iterator[Axes]:
    """Yield a scope once per segment of an axis that other axes are piecewise in."""
    for i, axis in enumerate(axes):
        selector = follow_links(axis)
        if isinstance(selector, Atom) and isinstance(selector.link, Sum):
            others = [resolve(a) for j, a in enumerate(axes) if j != i]
            if any(selects(a, selector) for a in others):
                for number, part in enumerate(selector.link.parts):
                    inside = [restrict(a, selector, number) for a in others]
                    yield from _branches((*inside[:i], part, *inside[i:]))
                return
    yield axes


def _visit(
    term: AxisTerm,
    inside: frozenset[Atom],
    outside: frozenset[Atom],
    beside: frozenset[int],
    ambiguous: tuple[frozenset[Atom], frozenset[Atom]],
) -> Iterator[Context]:
    """Yield the contexts of the parts of a resolved term that may depend on atoms inside and outside of its own axis.

    Some atoms are ambiguous: those that are repeated in the axis, and those that other axes have too. Of the former it
    cannot be told which coordinate is meant. One of the latter is a parent only of the factors that follow it: (heads units,
    heads units) is a square of two such axes, while in (heads, units heads, units) the square was cut anew.
    """
    repeated, elsewhere = ambiguous
    match term:
        case Atom():
            yield term, (inside | outside) - {term}, beside
        case Product(children):
            inside |= _covered(term) - repeated - elsewhere
            for i, child in enumerate(children):
                if not _is_independent(child):
                    others = frozenset(identity(c) for j, c in enumerate(children) if j != i)
                    yield from _visit(child, inside, outside, beside | others, ambiguous)
                inside |= _covered(child) - repeated
        case Sum(children):
            for child in children:
                if not _is_independent(child):
                    yield from _visit(child, inside, outside, beside, ambiguous)
        case Piecewise(_, children):
            yield term, inside | outside, beside
            for child in children:
                yield from _visit(child, inside, outside, beside, ambiguous)


@of_coordinates
def _covered(term: AxisTerm) -> frozenset[Atom]:
    """The atoms that have a coordinate at every position of a resolved term."""
    match term:
        case Atom():
            beside = _covered(resolve(term.covers)) if term.covers is not None else frozenset()
            return beside if term.is_scrambled else beside | {term}
        case Product(children):
            return frozenset().union(*map(_covered, children))
        case Sum(children) | Piecewise(_, children):
            return frozenset.intersection(*map(_covered, children))
    return frozenset()


@of_coordinates
def _count(term: AxisTerm) -> Mapping[Atom, int]:
    """How many coordinates each atom has at a position of a resolved term, at most."""
    match term:
        case Atom():
            return {term: 1} if term.covers is None else _add([{term: 1}, _count(resolve(term.covers))])
        case Product(children):
            return _add(map(_count, children))
        case Sum(children) | Piecewise(_, children):
            most: dict[Atom, int] = {}
            for counts in map(_count, children):
                most |= {atom: number for atom, number in counts.items() if number > most.get(atom, 0)}
            return most
    return {}


def _add(counts: Iterable[Mapping[Atom, int]]) -> dict[Atom, int]:
    total: dict[Atom, int] = {}
    for each in counts:
        for atom, number in each.items():
            total[atom] = total.get(atom, 0) + number
    return total


def _close(parents: frozenset[Atom]) -> frozenset[Atom]:
    """Drop parents whose own parents are missing: such families would not be closed under composition."""
    while True:
        kept = frozenset(p for p in parents if p.pin or parents_of(p) <= parents)
        if kept == parents:
            return kept
        parents = kept


def _ancestors(atom: Atom) -> set[Atom]:
    found: set[Atom] = set()
    pending = [atom]
    while pending:
        for parent in parents_of(pending.pop()):
            if parent not in found:
                found.add(parent)
                pending.append(parent)
    return found
