"""Positions along an axis: they are marked, and the axis is fixed where they are used for anything else than looking up."""

import pytest

from onebasin.symmetries import Pin
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.positions import (
    Counts,
    Offsets,
    Order,
    Positions,
    Sorting,
    find_original,
    iterate_marked,
    pin_broken_orders,
    pin_positions,
)

WHY = Pin("positions are read", "add")


def make_order() -> Order:
    """Six tokens that are sorted by which of three experts each has."""
    tokens, experts = Atom(6), Atom(3)
    return Order(Positions.make((tokens,), experts), Atom(6), tokens, WHY)


def test_sorted_positions_know_what_they_were():
    order = make_order()
    ordered = Positions.make((order.rows,), order.positions.along, order)
    assert find_original(ordered) is order.positions
    assert find_original(order.positions) is order.positions


def test_marked_tensors_are_found_among_arguments():
    order = make_order()
    counts, sorting = Counts.make(order.positions), Sorting.make(order)
    assert list(iterate_marked([1, {"index": counts, "x": (Atom(2),)}, [sorting]])) == [counts, sorting]
    assert counts == (order.positions.along,)
    assert sorting == (order.rows,)


@pytest.mark.parametrize("make", [lambda p: p, lambda p: Offsets.make(Counts.make(p))])
def test_positions_that_are_read_fix_their_axis(make):
    positions = make_order().positions
    pin_positions([make(positions)], WHY)
    assert positions.along.pin is WHY
    assert positions[0].pin is None


def test_counts_and_places_may_be_read():
    order = make_order()
    pin_positions([Counts.make(order.positions), Sorting.make(order)], WHY)
    assert order.positions.along.pin is None


def test_an_order_of_free_rows_is_kept():
    order = make_order()
    assert not pin_broken_orders([order], [(Atom(4),)])
    assert order.positions.along.pin is order.rows.pin is None


@pytest.mark.parametrize("broken", ["pinned", "owned", "shared"])
def test_rows_that_are_not_free_fix_the_experts(broken):
    order, other = make_order(), make_order()
    if broken == "pinned":
        order.rows.pin = Pin("something else", "mul")
    if broken == "shared":
        other.rows.link = order.rows
    owned = [(order.rows,)] if broken == "owned" else []
    assert pin_broken_orders([order, other], owned)
    assert order.positions.along.pin is WHY
    assert (other.positions.along.pin is WHY) == (broken == "shared")
    assert not pin_broken_orders([order, other], owned)  # a second look changes nothing
