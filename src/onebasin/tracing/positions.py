"""Tensors whose entries are positions along an axis that may move: where the largest scores are, how rows are sorted.

If experts are permuted, then the positions of the best of them are permuted likewise, and looking up those positions along
the permuted axis gives the same experts. So the axis stays free, as long as the positions are only looked up. Any operation
that does something else with them pins it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onebasin.symmetries import Pin
from onebasin.tracing.axes.terms import Atom, Axes, AxisTerm, leaves, resolve
from onebasin.tracing.axes.unification import pin


class Positions(tuple):
    """The axes of a tensor of positions.

    Attributes:
        along: the axis that they are positions along.
        rows: if they were sorted, the order that they are in.
    """

    along: AxisTerm
    rows: Order | None = None

    @staticmethod
    def make(axes: Axes, along: AxisTerm, rows: Order | None = None) -> Positions:
        """Mark the axes of a tensor."""
        return _mark(Positions, axes, along=along, rows=rows)


@dataclass(frozen=True, eq=False)
class Order:
    """Rows that were sorted by the position that each of them has, such as tokens by their experts.

    Permuting the axis of the positions permutes the rows, in a way that depends on the data. So the rows are an axis that
    must be free, and belong to nothing else.

    Attributes:
        positions: the positions, before they were sorted.
        rows: the axis of the sorted rows. Each has one position, so it covers the axis of the positions.
        source: the axis of the rows before.
        why: the reason to pin the axis of the positions if the rows cannot be free.
    """

    positions: Positions
    rows: Atom
    source: AxisTerm
    why: Pin


class Sorting(tuple):
    """The axes of a tensor that says, for each sorted row, where it was before."""

    order: Order

    @staticmethod
    def make(order: Order) -> Sorting:
        """The tensor of an order."""
        return _mark(Sorting, (order.rows,), order=order)


class Counts(tuple):
    """The axes of a tensor that says how often each position occurs."""

    positions: Positions

    @staticmethod
    def make(positions: Positions) -> Counts:
        """One number for each position."""
        return _mark(Counts, (positions.along,), positions=positions)


class Offsets(tuple):
    """The axes of a tensor that says, for each position, where its rows end if rows are sorted by position."""

    positions: Positions

    @staticmethod
    def make(counts: Counts) -> Offsets:
        """The running sum of counts."""
        return _mark(Offsets, counts, positions=counts.positions)


def _mark(kind: type[Any], axes: Axes, **attributes: Any) -> Any:
    result = kind(axes)
    vars(result).update(attributes)
    return result


def find_original(positions: Positions) -> Positions:
    """The positions before they were sorted."""
    return positions.rows.positions if positions.rows is not None else positions


def iterate_marked(value: Any) -> Iterable[Positions | Sorting | Counts | Offsets]:
    """Yield the marked tensors among the arguments of an operation."""
    if isinstance(value, (Positions, Sorting, Counts, Offsets)):
        yield value
    elif isinstance(value, (list, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from iterate_marked(entry)


def pin_positions(value: Any, why: Pin) -> None:
    """Fix the axes of positions that are used for anything else than looking up."""
    for marked in iterate_marked(value):
        if isinstance(marked, Positions):
            pin(marked.along, why)
        elif isinstance(marked, Offsets):
            pin(marked.positions.along, why)


def pin_broken_orders(orders: Iterable[Order], state: Iterable[Axes]) -> bool:
    """Fix the axes of positions by which rows were sorted that cannot be free. Returns whether anything changed."""
    owned = {atom for axes in state for axis in axes for atom in leaves(axis)}
    roots = [resolve(order.rows) for order in orders]
    changed = False
    for order, root in zip(orders, roots, strict=True):
        is_free = isinstance(root, Atom) and not root.pin and root not in owned and sum(r is root for r in roots) == 1
        fixed = [*leaves(order.rows), *leaves(order.positions.along)]
        if not is_free and not all(atom.pin for atom in fixed):
            pin(order.rows, order.why)  # the data say which row is where, not the parameters
            pin(order.positions.along, order.why)
            changed = True
    return changed
