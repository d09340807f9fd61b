"""Classes of axes that change their basis together: what unites them, and what narrows them."""

import pytest

from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.bases.classes import FROZEN, UNIFORM, Freedom, Paired, Ref, System
from onebasin.tracing.trace import Trace

ATOM, OTHER = Atom(4), Atom(4)
A, B, C = (Ref((key, 0, 0), False) for key in "abc")


@pytest.fixture
def system():
    return System(Trace(), {ATOM: "h", OTHER: "i"}, ())


def axis(state, atom=ATOM):
    return ((atom, state),)


def freedom(system, ref):
    return system._freedom.get(system._find(ref).unknown, Freedom.LINEAR)


def test_what_is_summed_over_is_dual(system):
    system.contract(axis(A), axis(B))
    system.contract(axis(B), axis(C))
    assert system._find(C) == A
    assert system._find(B) == Ref(A.unknown, True)
    assert freedom(system, A) == Freedom.LINEAR


def test_a_class_that_is_dual_to_itself_is_orthogonal(system):
    system.contract(axis(A), axis(B))
    system.equate(axis(A), axis(B))
    assert freedom(system, B) == Freedom.ORTHOGONAL


def test_classes_that_meet_have_the_lesser_freedom(system):
    system.sum_over(axis(A))
    system.equate(axis(B), axis(A))
    assert freedom(system, B) == Freedom.CENTRED


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (A, FROZEN, Freedom.SIGNED),
        (A, B, Freedom.LINEAR),
        (A, UNIFORM, Freedom.LINEAR),
        (UNIFORM, A, Freedom.LINEAR),
        (Paired(A, A), B, Freedom.SIGNED),
        (Paired(A, A), A, Freedom.SIGNED),
        (Paired(A, B), A, Freedom.PERMUTATION),
        (Paired(A, C), FROZEN, Freedom.PERMUTATION),
    ],
)
def test_products_of_entries(system, first, second, expected):
    system.multiply(axis(first), axis(second))
    assert freedom(system, A) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (A, FROZEN, Freedom.PERMUTATION),
        (A, UNIFORM, Freedom.CENTRED),
        (Paired(A, A), UNIFORM, Freedom.SIGNED),
        (Paired(A, A), Paired(A, A), Freedom.SIGNED),
    ],
)
def test_sums(system, first, second, expected):
    system.equate(axis(first), axis(second))
    assert freedom(system, A) == expected


def test_signs_do_not_keep_the_vector_of_ones(system):
    system.narrow(Freedom.SIGNED, axis(A))
    system.narrow(Freedom.CENTRED, axis(A))
    assert freedom(system, A) == Freedom.PERMUTATION


def test_a_sum_with_something_that_does_not_have_the_axis_keeps_the_vector_of_ones(system):
    assert system.equate((), axis(A)) == axis(A)
    assert freedom(system, A) == Freedom.CENTRED


def test_products_of_entries_are_for_sums_alone(system):
    product = system.multiply(axis(A), axis(B))
    system.sum_over(product)
    assert freedom(system, A) == Freedom.LINEAR
    assert system._find(B) == Ref(A.unknown, True)
    system.forbid(product)
    assert freedom(system, A) == Freedom.PERMUTATION


def test_a_sum_of_squares_keeps_lengths(system):
    system.sum_over(axis(Paired(A, A)))
    assert freedom(system, A) == Freedom.ORTHOGONAL


def test_axes_of_different_atoms_are_told_apart(system):
    system.contract(axis(A), axis(B, OTHER))
    assert [freedom(system, ref) for ref in (A, B)] == [Freedom.PERMUTATION] * 2
    assert system.equate(axis(A), axis(C, OTHER)) == axis(FROZEN)
