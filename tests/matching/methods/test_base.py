"""What every method inherits, and how options are refused."""

import pytest

from onebasin.matching.methods.base import Match, Method, check_choice, check_count, check_flag, check_number


@pytest.mark.parametrize(
    ("check", "value", "bounds", "message"),
    [
        (check_count, -1, {"at_least": 0}, "steps must be a whole number of at least 0, got -1"),
        (check_count, 2.5, {"at_least": 0}, "got 2.5"),
        (check_count, True, {"at_least": 0}, "got True"),
        (check_count, None, {"at_least": 0}, "got None"),
        (check_number, 0, {"above": 0}, "steps must be a number above 0, got 0"),
        (check_number, 1.0, {"above": 0, "below": 1}, "steps must be a number above 0 and below 1, got 1.0"),
        (check_number, float("nan"), {"at_least": 0}, "got nan"),
        (check_number, "3", {"at_least": 0}, "got '3'"),
        (check_flag, "no", {}, "steps must be True or False, got 'no'"),
    ],
)
def test_values_outside_their_range_are_refused(check, value, bounds, message):
    with pytest.raises(ValueError, match=message):
        check("steps", value, **bounds)


def test_values_in_their_range_and_defaults_are_taken():
    check_count("steps", 0, at_least=0)
    check_number("lr", 0.5, above=0, below=1)
    check_number("lr", None, above=0, optional=True)
    check_flag("polish", None, optional=True)


def test_other_words_are_refused():
    check_choice("order", "random", "anchored", "random")
    with pytest.raises(ValueError, match="order must be 'anchored' or 'random', got 'x'"):
        check_choice("order", "x", "anchored", "random")


def test_a_method_must_match():
    with pytest.raises(TypeError, match="abstract"):
        Method()  # type: ignore[abstract]

    class Nothing(Method):
        def match(self, problem):
            return Match(problem, 0.0, converged=True)

    assert not Nothing().resumes
    assert not Nothing.reads_lazily
