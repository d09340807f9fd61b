"""Which atoms a child may depend on: those that stand beside it in every tensor, and line up in every operation.

A *scope* is a tuple of axes that one operation reads side by side: the axes of a tensor, or the axes that two operands of a
contraction share. A child that lacks one of its parents in some scope is the same for all elements of that parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import reduce

from onebasin.symmetries import Pin
from onebasin.symmetries.layout import Product, Sum
from onebasin.tracing.axes.terms import (
    Atom,
    Axes,
    Cases,
    Unknown,
    forms,
    head,
    identity,
    parents_of,
    resolve,
    restrict,
    selects,
)
from onebasin.tracing.axes.unification import join

_NOT_ALIGNED = Pin("segments of an axis are treated alike")


def _covered(term: Unknown) -> frozenset[Atom]:
    """The atoms that have a coordinate at every position of a resolved term."""
    match term:
        case Atom():
            return frozenset([term])
        case Product(children):
            return frozenset().union(*map(_covered, children))
        case Sum(children) | Cases(_, children):
            return frozenset.intersection(*map(_covered, children))
    return frozenset()


def _visit(
    term: Unknown, near: frozenset[Atom], far: frozenset[Atom], beside: frozenset[tuple]
) -> Iterator[tuple[Atom | Cases, frozenset[Atom], frozenset[tuple]]]:
    """Every atom and case of a resolved term, with the atoms and the whole terms it may read a coordinate from."""
    match term:
        case Atom():
            yield term, (near | far) - {term}, beside
        case Product(children):
            counts = Counter(a for c in children for a in _covered(c))
            once = frozenset(a for a, n in counts.items() if n == 1)
            near, far = (near | once) - (counts.keys() - once), far - counts.keys()
            for i, child in enumerate(children):
                others = frozenset(identity(c) for j, c in enumerate(children) if j != i)
                yield from _visit(child, near, far, beside | others)
        case Sum(children):
            for child in children:
                yield from _visit(child, near, far, beside)
        case Cases(_, children):
            yield term, near | far, beside
            for child in children:
                yield from _visit(child, near, far, beside)


def _branches(axes: Axes) -> Iterator[Axes]:
    """A scope, once for each segment of an axis that other axes are told apart by."""
    for i, axis in enumerate(axes):
        selector = head(axis)
        if isinstance(selector, Atom) and isinstance(selector.link, Sum):
            others = [resolve(a) for j, a in enumerate(axes) if j != i]
            if any(selects(a, selector) for a in others):
                for number, part in enumerate(selector.link.parts):
                    inside = [restrict(a, selector, number) for a in others]
                    yield from _branches((*inside[:i], part, *inside[i:]))
                return
    yield axes


def _walk(axes: Axes) -> Iterator[tuple[Atom | Cases, frozenset[Atom], frozenset[tuple]]]:
    for branch in _branches(axes):
        terms = [resolve(a) for a in branch]
        covers = [_covered(t) for t in terms]
        total = Counter(a for cover in covers for a in cover)
        for i, (term, cover) in enumerate(zip(terms, covers, strict=True)):
            far = frozenset(a for a, n in total.items() if n == 1 and a not in cover)
            beside = frozenset(identity(t) for j, t in enumerate(terms) if j != i)
            yield from _visit(term, frozenset(), far, beside)


def enforce(axes: Axes) -> bool:
    """Take from every child in a scope the parents that are not in it. Returns whether anything changed."""
    changed = False
    for found, context, beside in list(_walk(axes)):
        if isinstance(found, Cases):
            if forms(found.selector).isdisjoint(beside):
                reduce(lambda a, b: join(a, b, _NOT_ALIGNED), found.parts)
                return True
        elif found.link is None and found.parents is None and not context:
            found.parents = context  # it stands alone here, so it depends on nothing anywhere
        elif found.link is None and found.parents:
            kept = _closed(parents_of(found) & context)
            if kept != found.parents:
                changed = changed or kept != parents_of(found)
                found.parents = kept
    return changed


def _closed(parents: frozenset[Atom]) -> frozenset[Atom]:
    """Drop parents whose own parents are missing: such families would not be closed under composition."""
    while True:
        kept = frozenset(p for p in parents if p.pin or parents_of(p) <= parents)
        if kept == parents:
            return kept
        parents = kept


def settle(scopes: Iterable[Axes]) -> None:
    """Enforce all scopes until nothing changes, then decide what was left open.

    An atom that was never asked depends on whatever stands beside it everywhere.
    """
    scopes = _distinct(scopes)
    _enforce_all(scopes)
    contexts: dict[Atom, frozenset[Atom]] = {}
    for scope in scopes:
        for found, context, _ in _walk(scope):
            if isinstance(found, Atom) and found.parents is None:
                contexts[found] = contexts.get(found, context) & context
    for atom in sorted(contexts, key=lambda a: a.birth):
        older = frozenset(p for p in contexts[atom] if p.size > 1 and p.parents is not None)
        atom.parents = _closed(frozenset(p for p in older if atom not in _ancestors(p)))
    _enforce_all(scopes)


def _enforce_all(scopes: list[Axes]) -> None:
    changed = True
    while changed:
        changed = False
        for scope in scopes:
            changed = enforce(scope) or changed


def _ancestors(atom: Atom) -> set[Atom]:
    found: set[Atom] = set()
    pending = [atom]
    while pending:
        for parent in parents_of(pending.pop()):
            if parent not in found:
                found.add(parent)
                pending.append(parent)
    return found


def _distinct(scopes: Iterable[Axes]) -> list[Axes]:
    unique = {tuple(identity(resolve(a)) for a in scope): scope for scope in scopes}
    return list(unique.values())
