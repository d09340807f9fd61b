"""Which axes of which parameters change their basis together, and how freely."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from onebasin.symmetries import Basis, Group, Place
from onebasin.symmetries.structure import BasisKind
from onebasin.tracing.axes.terms import Atom, parents_of
from onebasin.tracing.slots.system import Segments, Slots, SlotSystem, TensorSlots, atoms_of, list_parts
from onebasin.tracing.trace import Trace


class Freedom(IntEnum):
    """Which matrices leave the function alone."""

    LINEAR = 0
    """Any that can be inverted."""
    ORTHOGONAL = 1
    CENTRED = 2
    """Orthogonal ones that keep the vector of ones."""
    SIGNED = 3
    """Those that change signs of units."""
    PERMUTATION = 4
    """None but permutations."""


def meet(first: Freedom, second: Freedom) -> Freedom:
    """What both allow. Each is a subgroup of the one before, but for signs: they do not keep the vector of ones."""
    if {first, second} == {Freedom.CENTRED, Freedom.SIGNED}:
        return Freedom.PERMUTATION
    return max(first, second)


_KINDS: dict[Freedom, BasisKind] = {
    Freedom.LINEAR: "linear",
    Freedom.ORTHOGONAL: "orthogonal",
    Freedom.CENTRED: "centred",
    Freedom.SIGNED: "signed",
}

Unknown = tuple[str, int, int]
"""An axis of a parameter: its key, the number of the axis, and the number of the free atom in it."""


class Ref(NamedTuple):
    """A value that changes along an axis as a parameter does along one of its own: by the same matrix, or by its dual."""

    unknown: Unknown
    is_dual: bool


class Paired(NamedTuple):
    """The products of the entries of two values, as long as nothing but a sum is taken of them."""

    first: Ref
    second: Ref


UNIFORM = "uniform"
"""Along a slot: the value is the same everywhere."""
FROZEN = "frozen"
"""Along a slot: the value never changes, or changes by permutations only."""


class System(SlotSystem):
    """Axes of parameters that are transformed by one matrix M or, dual to it, by its inverse transpose.

    Two vectors of which a sum of products is taken are dual to each other: (M x)^T (M^-T y) = x^T y. A class of axes that is
    dual to itself has M = M^-T: it is orthogonal. One that is summed over has 1^T M = 1^T as well, and is taken to be both.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
        fixed: keys of parameters that are filled with one number and stay so.

    Attributes:
        gains: the keys of vectors that units are multiplied by entry by entry, in order, each with the number at which it
            multiplies by one; None if units are multiplied by a function of it.
    """

    def __init__(self, trace: Trace, names: Mapping[Atom, str], fixed: Iterable[str]):
        super().__init__(trace, names)
        self.fixed = frozenset(fixed)
        self.gains: dict[str, float | None] = {}
        self._links: dict[Unknown, Ref] = {}
        self._freedom: dict[Unknown, Freedom] = {}

    def read(self, key: str) -> TensorSlots:
        """The axes of a parameter, each a class of its own until something is required."""
        return tuple(self._read_axis(key, axis, atoms) for axis, atoms in enumerate(self.template(self.trace.state[key])))

    def _read_axis(self, key: str, axis: int, atoms: Any) -> Slots | Segments:
        numbers = itertools.count()

        def read(part: Iterable[Atom]) -> Slots:
            return tuple((a, UNIFORM if key in self.fixed else Ref((key, axis, next(numbers)), False)) for a in part)

        return Segments(map(read, atoms)) if isinstance(atoms, Segments) else read(atoms)

    def absorbs_offset(self, key: str) -> bool:
        """A sum is filled with one number if the vector is. Otherwise no matrix of the vector is one of the sum."""
        return key in self.fixed

    def constant(self, atoms: Iterable[Atom]) -> Slots:
        """It never changes."""
        return tuple((atom, FROZEN) for atom in atoms)

    def forbid(self, *axes: Slots) -> None:
        """Nothing but permutations may happen along these axes."""
        self.narrow(Freedom.PERMUTATION, *axes)

    def narrow(self, freedom: Freedom, *axes: Slots) -> None:
        """Allow no more than these matrices along axes.

        Of products, only a sum allows more than a permutation; but a square stays the same if signs are changed.
        """
        for _, state in itertools.chain(*axes):
            allowed = freedom
            if isinstance(state, Paired):
                allowed = Freedom.SIGNED if state.first == state.second else Freedom.PERMUTATION
            for ref in state if isinstance(state, Paired) else [state] if isinstance(state, Ref) else ():
                root = self._find(ref).unknown
                self._freedom[root] = meet(allowed, self._freedom.get(root, Freedom.LINEAR))

    def equate(self, first: Slots, *others: Slots) -> Slots:
        """Operands of a sum change in the same way. Where one is constant along an axis, the vector of ones is kept."""
        for other in others:
            if not first or not other:
                self.narrow(Freedom.CENTRED, first, other)
                first = first or other
            elif atoms_of(first) != atoms_of(other):
                self.forbid(first, other)
                first = self.constant(atoms_of(first))
            else:
                first = tuple((a, self._join(a, x, y)) for (a, x), (_, y) in zip(first, other, strict=True))
        return first

    def _join(self, atom: Atom, x: object, y: object) -> object:
        if isinstance(x, Ref) and isinstance(y, Ref):
            self._unite(x, y, dual=False)
            return x
        if UNIFORM in (x, y):
            self.narrow(Freedom.CENTRED, ((atom, x), (atom, y)))
            return y if x == UNIFORM else x
        self.forbid(((atom, x), (atom, y)))
        return FROZEN

    def multiply(self, first: Slots, second: Slots) -> Slots:
        """A value times another that is the same everywhere; or products of entries, which may be summed over."""
        if not first or not second:
            return first or second
        if atoms_of(first) != atoms_of(second):
            self.forbid(first, second)
            return self.constant(atoms_of(first))
        return tuple((atom, self._pair(atom, x, y)) for (atom, x), (_, y) in zip(first, second, strict=True))

    def divide(self, first: Slots, second: Slots) -> Slots:
        """By what is the same along the axes of the dividend."""
        if any(state != UNIFORM for _, state in second):
            self.forbid(second)
        return self.multiply(first, second)

    def _pair(self, atom: Atom, x: object, y: object) -> object:
        if UNIFORM in (x, y):
            return y if x == UNIFORM else x
        if isinstance(x, Ref) and isinstance(y, Ref):
            return Paired(x, y)
        for changing, other in ((x, y), (y, x)):
            is_square = isinstance(other, Paired) and other.first == other.second
            if isinstance(changing, Ref) and (other == FROZEN or is_square):
                self.narrow(Freedom.SIGNED, ((atom, changing), (atom, other)))
                return changing
        self.forbid(((atom, x), (atom, y)))
        return FROZEN

    def contract(self, first: Slots, second: Slots) -> None:
        """What is summed over is dual to each other."""
        if atoms_of(first) != atoms_of(second):
            self.forbid(first, second)
            return
        for (atom, x), (_, y) in zip(first, second, strict=True):
            if isinstance(x, Ref) and isinstance(y, Ref):
                self._unite(x, y, dual=True)
            elif UNIFORM in (x, y):
                self.sum_over(((atom, x), (atom, y)))
            else:
                self.forbid(((atom, x), (atom, y)))

    def sum_over(self, axis: Slots) -> None:
        """A sum keeps the vector of ones; values whose products are summed over are dual to each other."""
        for atom, state in axis:
            if isinstance(state, Paired):
                self._unite(state.first, state.second, dual=True)
            else:
                self.narrow(Freedom.CENTRED, ((atom, state),))

    def _find(self, ref: Ref) -> Ref:
        """The first of its class, with what the axis is to it."""
        while (above := self._links.get(ref.unknown)) is not None:
            ref = Ref(above.unknown, ref.is_dual != above.is_dual)
        return ref

    def _unite(self, x: Ref, y: Ref, dual: bool) -> None:
        x, y = self._find(x), self._find(y)
        is_dual = (x.is_dual != y.is_dual) != dual
        if x.unknown != y.unknown:
            freedom = meet(*(self._freedom.get(each.unknown, Freedom.LINEAR) for each in (x, y)))
            self._links[y.unknown] = Ref(x.unknown, is_dual)
            self._freedom[x.unknown] = freedom
        elif is_dual:
            self._freedom[x.unknown] = meet(Freedom.ORTHOGONAL, self._freedom.get(x.unknown, Freedom.LINEAR))

    def solve(self, keys: Sequence[str], groups: Mapping[str, Group]) -> dict[str, Basis]:
        """A basis for each class that allows more than permutations and that two axes or more belong to."""
        parents = {parent for atom in self.names for parent in parents_of(atom)}
        order = {key: number for number, key in enumerate(keys)}
        classes: dict[Unknown, list[tuple[Unknown, Atom, bool]]] = {}
        for key in sorted(self.trace.state.keys() & self.trace.reached, key=order.__getitem__):
            for slots in self.read(key):
                for atom, state in itertools.chain(*list_parts(slots)):
                    if isinstance(state, Ref) and atom not in parents:
                        root = self._find(state)
                        classes.setdefault(root.unknown, []).append((state.unknown, atom, root.is_dual))
        found: dict[str, Basis] = {}
        for root, members in classes.items():
            freedom = self._freedom.get(root, Freedom.LINEAR)
            if freedom == Freedom.SIGNED and any(self._is_stacked(unknown) for unknown, _, _ in members):
                continue  # signs are laid out along one axis, and cannot differ beside another
            if freedom < Freedom.PERMUTATION and len(members) > 1:
                basis = self._make_basis(members, freedom, taken=found)
                found[basis.name] = replace(basis, parents=groups[basis.group].parents)
        return found

    def _is_stacked(self, unknown: Unknown) -> bool:
        key, axis, _ = unknown
        return isinstance(self.template(self.trace.state[key])[axis], Segments)

    def _make_basis(self, members: Sequence[tuple[Unknown, Atom, bool]], freedom: Freedom, taken: Iterable[str]) -> Basis:
        aliases: dict[str, list[str]] = {}
        for key, first in self.trace.aliases.items():
            aliases.setdefault(first, []).append(key)
        # What makes units is transformed by the matrix itself, so that it names the basis.
        (base, _, _), atom, flipped = min(members, key=lambda member: member[0][1] > 0)
        places: dict[str, list[Place]] = {}
        for (key, axis, number), each, is_dual in members:
            atoms = self.template(self.trace.state[key])[axis]
            atoms = tuple(itertools.chain(*atoms)) if isinstance(atoms, Segments) else atoms
            place = Place(axis, atoms[:number].count(each), is_dual != flipped)
            for alias in aliases.get(key, [key]):
                places.setdefault(alias, []).append(place)
        names = itertools.chain([base], (f"{base}:{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        return Basis(name, self.names[atom], _KINDS[freedom], {key: tuple(found) for key, found in places.items()})
