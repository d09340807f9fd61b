"""Terms resolve to a normal form that follows every later refinement."""

import threading

from onebasin.symmetries import Pin
from onebasin.tracing.axes import terms
from onebasin.tracing.axes.terms import (
    ONE,
    Atom,
    Piecewise,
    Product,
    Sum,
    Uniform,
    depth,
    follow_links,
    forget_normal_forms,
    identity,
    leaves,
    parents_of,
    resolve,
    restrict,
    same_selector,
)


def cut_atom(*sizes, parents=frozenset()):
    atom = Atom(sum(sizes), parents)
    atom.link = Sum(tuple(Atom(size, parents) for size in sizes))
    return atom


def test_links_are_followed():
    first, second, third = Atom(4), Atom(4), Atom(4)
    first.link, second.link = second, third
    assert resolve(first) is third
    assert resolve(Product((first, ONE))) is third


def test_products_and_sums_are_flattened():
    a, b, c = Atom(2), Atom(3), Atom(5)
    assert identity(resolve(Product((a, Product((b, ONE, c)))))) == identity(Product((a, b, c)))
    assert identity(resolve(Sum((a, Sum((b, c)))))) == identity(Sum((a, b, c)))
    assert resolve(Sum((Sum((a,)),))) is a


def test_a_sum_inside_a_product_becomes_a_sum_of_products():
    selector, inner = cut_atom(2, 3), Atom(4, frozenset())
    found = resolve(Product((selector, inner)))
    assert isinstance(found, Sum)
    assert [part.size for part in found.parts] == [8, 12]


def test_a_child_of_an_atom_that_was_cut_is_piecewise():
    parent = Atom(5, frozenset())
    child = Atom(4, frozenset([parent]))
    parent.link = Sum((Atom(2, frozenset()), Atom(3, frozenset())))
    found = resolve(child)
    assert isinstance(found, Piecewise)
    assert [part.size for part in found.parts] == [4, 4]
    first, second = leaves(child)
    assert first is not second
    assert resolve(restrict(child, parent, 1)) is second
    assert depth(found) == 2


def test_piecewise_terms_with_equal_parts_are_one():
    selector, same = cut_atom(1, 1), Atom(3)
    assert resolve(Piecewise(selector, (same, same))) is same


def test_links_are_followed_up_to_an_atom_that_was_cut():
    selector = cut_atom(2, 3)
    first = Atom(5)
    first.link = selector
    assert follow_links(first) is selector
    assert same_selector(selector, selector)
    assert not same_selector(selector, cut_atom(2, 3))


def test_parents_are_those_that_atoms_turned_out_to_be():
    old, new, outer, inner = Atom(6), Atom(6), Atom(2), Atom(3)
    child = Atom(4, frozenset([old]))
    old.link = new
    assert parents_of(child) == {new}
    new.link = Product((outer, inner))
    assert parents_of(child) == {outer, inner}


def test_pinned_atoms_have_no_parents():
    assert Atom(3, frozenset([Atom(2)]), Pin("fixed")).parents == frozenset()
    assert repr(Atom(3, pin=Pin("fixed"))).startswith("!a")


def test_identities_tell_uniform_extents_by_their_size():
    assert identity(Uniform(3)) == identity(Uniform(3)) != identity(Uniform(4))


def test_normal_forms_follow_changes():
    a, b, c = Atom(6), Atom(2), Atom(3)
    product = Product((a, Atom(5)))
    assert leaves(product)[0] is a
    a.link = Product((b, c))
    assert leaves(product)[:2] == [b, c]


def test_normal_forms_are_kept_until_an_atom_changes_that_they_need():
    first, second, third = Atom(4), Atom(6), Atom(5)
    inner = Sum((first, second))
    outer, other = Sum((inner, third)), Product((second, third))
    forms = resolve(outer), resolve(other)
    third.pin, third.parents = Pin("a reason"), frozenset()
    Atom(2).link = first
    assert (resolve(outer), resolve(other)) == forms
    assert resolve(outer) is forms[0]
    first.link = Sum((Atom(1), Atom(3)))
    assert [part.size for part in resolve(outer).parts] == [1, 3, 6, 5]
    assert resolve(other) is forms[1]


def test_a_child_is_split_when_its_parent_is_cut_later():
    parent = Atom(4)
    grown = Atom(3)
    alone, beside = Product((grown, Atom(2))), Product((Atom(5), Atom(3, frozenset({parent}))))
    before = resolve(alone), resolve(beside)
    parent.link = Sum((Atom(1), Atom(3)))
    assert isinstance(resolve(beside).factors[1], Piecewise)
    assert resolve(alone) is before[0]
    grown.parents = frozenset({parent})
    assert isinstance(resolve(alone).factors[0], Piecewise)


def test_single_entries_of_a_sum_share_what_stands_beside_them():
    rest = Product((cut_atom(*[1] * 8), Atom(3)))
    form = resolve(Product((cut_atom(*[1] * 8), rest)))
    assert isinstance(form, Sum)
    assert [part.size for part in form.parts] == [3] * 64
    assert len({id(part) for part in form.parts}) == 1


def test_normal_forms_belong_to_a_thread():
    product = Product((Atom(6), Atom(5)))
    resolve(product)
    mine = terms._thread.normal_forms
    assert mine._known
    found = []

    def run():
        Atom(3).pin = Pin("a change")
        found.append(terms._thread.normal_forms)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0] is not mine
    assert mine._known
    forget_normal_forms()
    assert not mine._known


def test_equal_terms_have_one_normal_form_and_one_identity():
    a, b, c = Atom(2), Atom(3), Atom(5)
    first, second = Product((a, Product((b, c)))), Product((Product((a, b)), c))
    assert resolve(first) is resolve(second)
    assert identity(resolve(first)) == identity(resolve(second))
    assert identity(resolve(first)) != identity(resolve(Product((a, c, b))))
