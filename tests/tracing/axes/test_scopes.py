"""A child depends on what stands beside it everywhere, and on nothing else."""

from onebasin.symmetries import Pin
from onebasin.tracing.axes import scopes
from onebasin.tracing.axes.scopes import Settled, enforce, solve_scopes
from onebasin.tracing.axes.terms import Atom, Piecewise, Product, Sum, now, resolve


def test_a_parent_that_is_missing_in_a_scope_is_dropped():
    parent = Atom(2, frozenset())
    child = Atom(3, frozenset([parent]))
    assert not enforce((parent, child))
    assert child.parents == {parent}
    assert enforce((child,))
    assert child.parents == frozenset()
    assert not enforce((child,))


def test_a_parent_in_the_same_product_counts():
    parent = Atom(2, frozenset())
    child = Atom(3, frozenset([parent]))
    assert not enforce((Product((parent, child)),))
    assert child.parents == {parent}


def test_a_parent_that_occurs_twice_does_not_count():
    """It cannot be told which of the two coordinates is meant."""
    parent = Atom(2, frozenset())
    child = Atom(3, frozenset([parent]))
    enforce((parent, parent, child))
    assert child.parents == frozenset()


def test_a_parent_in_every_segment_counts():
    parent, other = Atom(2, frozenset()), Atom(2, frozenset())
    child = Atom(3, frozenset([parent]))
    assert not enforce((Sum((parent, parent)), child))
    assert enforce((Sum((parent, other)), child))


def test_a_missing_parent_is_dropped_at_every_level():
    top = Atom(2, frozenset())
    middle = Atom(3, frozenset([top]))
    child = Atom(4, frozenset([top, middle]))
    enforce((middle, child))
    assert middle.parents == frozenset()
    assert child.parents == {middle}


def test_a_fixed_parent_needs_no_parents():
    fixed = Atom(2, pin=Pin("fixed"))
    child = Atom(3, frozenset([fixed]))
    enforce((fixed, child))
    assert child.parents == {fixed}


def test_an_atom_that_stands_alone_depends_on_nothing():
    alone = Atom(3)
    enforce((alone,))
    assert alone.parents == frozenset()


def test_what_no_scope_restricts_depends_on_all_beside_it():
    first, second = Atom(2, frozenset()), Atom(3)
    solve_scopes([(first, second), (first, second, Atom(4, frozenset()))])
    assert second.parents == {first}


def test_two_atoms_do_not_depend_on_each_other():
    first, second = Atom(2), Atom(3)
    solve_scopes([(first, second)])
    assert first.parents == frozenset()
    assert second.parents == {first}


def test_piecewise_terms_without_their_selector_have_equal_parts():
    selector = Atom(5, frozenset())
    selector.link = Sum((Atom(2, frozenset()), Atom(3, frozenset())))
    parts = Atom(4, frozenset()), Atom(4, frozenset())
    term = Piecewise(selector, parts)
    assert not enforce((selector, term))
    assert enforce((term,))
    assert resolve(parts[0]) is resolve(parts[1])


def test_a_scope_is_settled_until_something_in_it_changes():
    parent = Atom(6, frozenset())
    child, other = Atom(3, frozenset([parent])), Atom(3, frozenset([parent]))
    changes = {
        "nothing": lambda: None,
        "another atom": lambda: setattr(Atom(6, frozenset()), "pin", Pin("fixed")),
        "a parent is lost": lambda: setattr(other, "parents", frozenset()),
        "an atom is scrambled": lambda: setattr(child, "is_scrambled", True),
        "a parent is cut": lambda: setattr(parent, "link", Sum((Atom(2, frozenset()), Atom(4, frozenset())))),
    }
    for name, change in changes.items():
        time = now()
        settled = Settled((parent, Product((child, other))), time)
        change()
        assert settled.is_current() == (name in ("nothing", "another atom")), name


def test_a_selector_beside_a_scope_is_part_of_what_it_depends_on():
    selector = Atom(4, frozenset())
    selector.link = Sum((Atom(2, frozenset()), Atom(2, frozenset())))
    term = Piecewise(selector, (Atom(3, frozenset()), Atom(3, frozenset())))
    settled = Settled((term,), now())
    assert settled.is_current()
    selector.coarse = Atom(2, frozenset())
    assert not settled.is_current()


def test_solving_again_enforces_what_has_changed(monkeypatch):
    enforced = []
    monkeypatch.setattr(scopes, "enforce", lambda scope: enforced.append(scope) or enforce(scope))
    first, second = (Atom(2, frozenset()), Atom(3, frozenset())), (Atom(5, frozenset()),)
    settled = {}
    solve_scopes([first, second], settled)
    enforced.clear()
    solve_scopes([first, second], settled)
    assert enforced == []
    first[0].pin = Pin("fixed")
    solve_scopes([first, second], settled)
    assert enforced == [first]
