"""Joining, splitting and cutting terms: every step only makes the symmetry smaller."""

import pytest

from onebasin.symmetries import Pin
from onebasin.tracing.axes.terms import ONE, Atom, Piecewise, Product, Sum, Uniform, leaves, parents_of, resolve
from onebasin.tracing.axes.unification import cut, join, join_all, narrow, pin, pinned, split, split_segments

WHY = Pin("for a test")


def sizes(term):
    return [atom.size for atom in leaves(term)]


def test_atoms_are_merged_with_the_parents_that_both_have():
    both, one = Atom(2, frozenset()), Atom(3, frozenset())
    first, second = Atom(4, frozenset([both, one])), Atom(4, frozenset([both]))
    assert join(first, second, WHY) is resolve(second)
    assert parents_of(resolve(first)) == {both}


def test_parents_that_are_not_known_yet_do_not_count():
    parent = Atom(2, frozenset())
    found = join(Atom(4), Atom(4, frozenset([parent])), WHY)
    assert isinstance(found, Atom)
    assert found.parents == {parent}


def test_a_pin_spreads():
    first, second = Atom(4), pinned(4, WHY)
    join(first, second, Pin("another"))
    assert resolve(first).pin is WHY
    product = Product((Atom(2), Atom(3)))
    pin(product, WHY)
    pin(product, Pin("another"))
    assert {atom.pin for atom in leaves(product)} == {WHY}
    assert pinned(1, WHY) is ONE


def test_what_is_uniform_fits_everything():
    atom = Atom(4)
    assert join(atom, Uniform(4), WHY) is atom
    assert join(Uniform(4), atom, WHY) is atom


def test_an_atom_is_bound_to_a_structure():
    atom = Atom(6)
    join(atom, Product((Atom(2), Uniform(3))), WHY)
    assert sizes(atom) == [2, 3]


def test_sums_are_cut_at_all_boundaries():
    first, second = Sum((Atom(2), Atom(4))), Sum((Atom(3), Atom(3)))
    assert sizes(join(first, second, WHY)) == [2, 1, 3]
    assert sizes(first) == sizes(second) == [2, 1, 3]


def test_products_are_split_at_all_boundaries():
    first, second = Product((Atom(2), Atom(6))), Product((Atom(4), Atom(3)))
    join(first, second, WHY)
    assert sizes(first) == sizes(second) == [2, 2, 3]


def test_products_that_do_not_fit_are_pinned():
    first, second = Product((Atom(2), Atom(3))), Product((Atom(3), Atom(2)))
    join(first, second, WHY)
    assert {atom.pin for term in (first, second) for atom in leaves(term)} == {WHY}


def test_extents_must_be_equal():
    with pytest.raises(AssertionError, match="extents 2 and 3 cannot be joined"):
        join(Atom(2), Atom(3), WHY)


def test_parents_are_joined_before_children():
    parents = Atom(2, frozenset()), Atom(2, frozenset())
    children = tuple(Atom(3, frozenset([parent])) for parent in parents)
    join_all([children, parents], WHY)
    assert parents_of(resolve(children[0])) == {resolve(parents[0])}


def test_splitting_makes_the_inner_part_a_child():
    outer, inner = split(Atom(6, frozenset()), 3)
    assert (outer.size, inner.size) == (2, 3)
    assert parents_of(inner) == {outer}
    assert split(Atom(6), 4) is None
    assert split(Uniform(6), 3)[1].size == 3
    assert split(Atom(6), 1)[1] is ONE


def test_splitting_a_sum_gives_a_piecewise_inner_part():
    outer, inner = split(Sum((Atom(4), Atom(2))), 2)
    assert (outer.size, inner.size) == (3, 2)
    assert isinstance(inner, Piecewise)
    assert split(Sum((Atom(3), Atom(3))), 2) is None


def test_splitting_across_the_parts_of_a_sum_gives_segments():
    first, second = Atom(6), Atom(2)
    assert split(Sum((first, second)), 4) is None
    halves = split_segments(Sum((first, second)), 4)
    assert halves is not None
    outer, inner = halves
    assert sizes(outer) == [1, 1]
    assert isinstance(inner, Piecewise)
    assert [sizes(part) for part in inner.parts] == [[4], [2, 2]]
    assert sizes(first) == [4, 2]
    assert resolve(Product((outer, inner))) == Sum((*leaves(first), second))


def test_what_is_no_sum_has_no_segments():
    assert split_segments(Product((Atom(4), Atom(3))), 6) is None
    assert split_segments(Sum((Atom(6), Atom(2))), 3) is None
    assert split_segments(Sum((Atom(100), Atom(101))), 3) is None


def test_cutting():
    atom = Atom(6)
    assert [part.size for part in cut(atom, [2, 5])] == [2, 3, 1]
    assert sizes(atom) == [2, 3, 1]
    assert cut(Uniform(4), [0, 4])[0].size == 4
    assert [part.size for part in cut(Product((Atom(3), Atom(2))), [2])] == [2, 4]
    inside = cut(Product((Atom(3), Atom(4))), [6])
    assert [part.size for part in inside] == [6, 6]


def test_children_keep_the_part_of_a_range():
    parent = Atom(5, frozenset())
    child = Atom(4, frozenset([parent]))
    cut(parent, [2])
    first, second = leaves(child)
    assert resolve(narrow((parent, child), 0, 0, 2)[1]) is first
    assert resolve(narrow((parent, child), 0, 2, 3)[1]) is second
    assert narrow((parent, child), 0, 1, 1)[0] is ONE


def test_a_long_sum_is_added_up_once_when_it_is_cut(monkeypatch):
    term, added = Sum(tuple(Atom(2) for _ in range(50))), []
    size = Sum.size.func
    monkeypatch.setattr(Sum, "size", property(lambda self: (added.append(self), size(self))[1]))
    pieces = cut(term, range(1, 100, 2))
    assert len(added) == 1
    assert list(map(sizes, pieces)) == [[1], *[[1, 1]] * 49, [1]]
