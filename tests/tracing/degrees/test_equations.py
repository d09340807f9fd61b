"""Linear equations between degrees, and a basis of their solutions."""

from fractions import Fraction

from onebasin.tracing.degrees.equations import find_null_space, plus, times

A, B, C, D = ((key, 0, 0) for key in "abcd")


def test_each_solution_begins_with_the_unknown_that_is_free():
    """a = b and b + c = 0 leave one number, and d, which nothing is required of, another."""
    equations = [{A: Fraction(1), B: Fraction(-1)}, {B: Fraction(1), C: Fraction(1)}]
    assert find_null_space([A, B, C, D], equations) == [{A: 1, B: 1, C: -1}, {D: 1}]


def test_solutions_are_whole_numbers():
    assert find_null_space([A, B], [{A: Fraction(1), B: Fraction(-2)}]) == [{A: 2, B: 1}]


def test_equations_that_contradict_leave_nothing():
    equations = [{A: Fraction(1), B: Fraction(-1)}, {A: Fraction(1), B: Fraction(1)}, {A: Fraction(3)}]
    assert find_null_space([A, B], equations) == []


def test_forms_that_cancel_out_are_empty():
    form = {A: Fraction(1), B: Fraction(2)}
    assert plus(form, times(form, -1)) == {}
    assert plus(form, {B: Fraction(-2)}) == {A: 1}
