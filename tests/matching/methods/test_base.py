"""What every method inherits, and how options are refused."""

import pytest

from onebasin.matching.methods.base import Match, Method, check_choice, check_option


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-1, {"at_least": 0}, "steps must be a number at least 0, got -1"),
        (0, {"above": 0}, "steps must be a number above 0, got 0"),
        (1.0, {"above": 0, "below": 1}, "steps must be a number above 0 and below 1, got 1.0"),
        (float("nan"), {"at_least": 0}, "got nan"),
        ("3", {"at_least": 0}, "got '3'"),
    ],
)
def test_numbers_outside_their_range_are_refused(value, bounds, message):
    with pytest.raises(ValueError, match=message):
        check_option("steps", value, **bounds)


@pytest.mark.parametrize(("value", "bounds"), [(0, {"at_least": 0}), (0.5, {"above": 0, "below": 1}), (None, {"above": 0})])
def test_numbers_in_their_range_and_defaults_are_taken(value, bounds):
    check_option("steps", value, **bounds)


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
