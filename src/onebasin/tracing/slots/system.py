"""What the operations of programs require of slots, for one kind of symmetry beside permutations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onebasin.tracing.axes.terms import (
    Atom,
    Axes,
    AxisTerm,
    Piecewise,
    Product,
    Sum,
    follow_links,
    leaves,
    resolve,
    same_selector,
)
from onebasin.tracing.slots.vectors import find_vectors
from onebasin.tracing.trace import Trace

Slots = tuple[tuple[Atom, Any], ...]
"""The free atoms of an axis, in order, each with what is known of the value along it."""
TensorSlots = tuple[Any, ...]
"""One for each axis of a tensor: its slots, or `Segments`."""


class Segments(tuple[Any, ...]):
    """An axis that is another one beside each segment of another axis, as of packed queries, keys and values: its parts."""

    __slots__ = ()


class SlotSystem(ABC):
    """Collects what operations require.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.

    Attributes:
        vectors: of the state, in the programs of the trace.
    """

    def __init__(self, trace: Trace, names: Mapping[Atom, str]):
        self.trace = trace
        self.vectors = find_vectors(trace)
        self.names = {atom: name for atom, name in names.items() if not atom.pin}

    def template(self, axes: Axes) -> tuple[Any, ...]:
        """The free atoms of each axis; those of each segment of another one, if it differs beside them."""
        return tuple(self._list_atoms(axis, axes) for axis in axes)

    def _list_atoms(self, axis: AxisTerm, axes: Axes) -> Any:
        pieces = list(_outermost_pieces(axis))
        if not pieces:
            return tuple(atom for atom in leaves(axis) if atom in self.names)
        selector, count = pieces[0].selector, len(_flatten(pieces[0]))
        if len({id(piece.selector) for piece in pieces}) > 1 or any(len(_flatten(p)) != count for p in pieces):
            return ()
        if count != selector.size and not any(_tells_apart(other, selector, count) for other in axes):
            return ()
        parts = [tuple(atom for atom in _leaves_beside(axis, n) if atom in self.names) for n in range(count)]
        return Segments(parts) if any(parts) else ()

    def list_atoms(self, key: str) -> tuple[tuple[Atom, ...], ...]:
        """The free atoms of each axis of a parameter; none of one that differs beside each segment of another."""
        return tuple(() if isinstance(atoms, Segments) else atoms for atoms in self.template(self.trace.state[key]))

    def make_constant(self, axes: Any) -> Any:
        """A value with these axes that nothing changes; or a list of values."""
        if isinstance(axes, list):
            return [self.make_constant(entry) for entry in axes]
        if not isinstance(axes, tuple):
            return axes
        return tuple(
            Segments(map(self.constant, atoms)) if isinstance(atoms, Segments) else self.constant(atoms)
            for atoms in self.template(axes)
        )

    @abstractmethod
    def read(self, key: str) -> TensorSlots:
        """A parameter or buffer."""

    @abstractmethod
    def absorbs_offset(self, key: str) -> bool:
        """Whether a vector that is always read with a number added to it may be read as if it were the sum."""

    @abstractmethod
    def constant(self, atoms: Iterable[Atom]) -> Slots:
        """An axis of a value that nothing changes."""

    @abstractmethod
    def forbid(self, *axes: Slots) -> None:
        """Say that nothing but a permutation may happen along these axes."""

    @abstractmethod
    def equate(self, first: Slots, *others: Slots) -> Slots:
        """The same axis of operands that are added. Along an axis that an operand does not have it is constant."""

    @abstractmethod
    def multiply(self, first: Slots, second: Slots) -> Slots:
        """The same axis of operands that are multiplied entry by entry."""

    @abstractmethod
    def divide(self, first: Slots, second: Slots) -> Slots:
        """The same axis of operands of which one is divided by the other entry by entry."""

    @abstractmethod
    def contract(self, first: Slots, second: Slots) -> None:
        """The same axis of operands whose product is summed over it."""

    @abstractmethod
    def sum_over(self, axis: Slots) -> None:
        """An axis that is summed over by itself."""


def atoms_of(slots: Slots | Segments) -> tuple[Any, ...]:
    """The free atoms of an axis; of segments, those of each."""
    if isinstance(slots, Segments):
        return Segments(map(atoms_of, slots))
    return tuple(atom for atom, _ in slots)


def list_parts(axis: Slots | Segments) -> Iterable[Slots]:
    """The parts of segments, or the axis itself."""
    return tuple(axis) if isinstance(axis, Segments) else (axis,)


def _tells_apart(axis: AxisTerm, selector: Atom, count: int) -> bool:
    """Whether an axis has one entry for each segment of a selector whose segments may be longer."""
    found = follow_links(axis)
    return isinstance(found, Atom) and found.size == count and same_selector(found, selector)


def _outermost_pieces(term: AxisTerm) -> Iterator[Piecewise]:
    match resolve(term):
        case Piecewise() as piece:
            yield piece
        case Product(children) | Sum(children):
            for child in children:
                yield from _outermost_pieces(child)


def _flatten(term: AxisTerm) -> list[AxisTerm]:
    """What a term is beside each entry of the axis that decides, which may have been cut again and again."""
    match resolve(term):
        case Piecewise(_, parts):
            return [leaf for part in parts for leaf in _flatten(part)]
        case found:
            return [found]


def _leaves_beside(term: AxisTerm, number: int) -> Iterator[Atom]:
    """The atoms of a term beside one entry of the axis that decides."""
    match resolve(term):
        case Piecewise() as piece:
            yield from leaves(_flatten(piece)[number])
        case Product(children) | Sum(children):
            for child in children:
                yield from _leaves_beside(child, number)
        case found:
            yield from leaves(found)
