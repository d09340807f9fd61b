"""What the operations of programs require of slots, for one kind of symmetry beside permutations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from onebasin.tracing.axes.terms import Atom, Axes, has_piecewise_parts, leaves
from onebasin.tracing.trace import Trace

Slots = tuple[tuple[Atom, Any], ...]
"""The free atoms of an axis, in order, each with what is known of the value along it."""
TensorSlots = tuple[Slots, ...]
"""One for each axis of a tensor."""


class SlotSystem(ABC):
    """Collects what operations require.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
    """

    def __init__(self, trace: Trace, names: Mapping[Atom, str]):
        self.trace = trace
        self.names = {atom: name for atom, name in names.items() if not atom.pin}

    def template(self, axes: Axes) -> tuple[tuple[Atom, ...], ...]:
        """The free atoms of each axis; none where it differs beside each segment of another: no order tells them apart."""
        return tuple(
            () if has_piecewise_parts(axis) else tuple(atom for atom in leaves(axis) if atom in self.names) for axis in axes
        )

    @abstractmethod
    def read(self, key: str) -> TensorSlots:
        """A parameter or buffer."""

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
    def contract(self, first: Slots, second: Slots) -> None:
        """The same axis of operands whose product is summed over it."""

    @abstractmethod
    def sum_over(self, axis: Slots) -> None:
        """An axis that is summed over by itself."""


def atoms_of(slots: Slots) -> tuple[Atom, ...]:
    """The free atoms of an axis."""
    return tuple(atom for atom, _ in slots)
