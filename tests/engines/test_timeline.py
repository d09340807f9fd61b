import pytest

from onebasin.engines.clock import Span
from onebasin.engines.timeline import MAX_WORKERS, NUM_INTERVALS, Timeline


def test_seconds_stay_where_they_were_spent_as_a_run_becomes_longer():
    timeline = Timeline()
    timeline.add("a", [Span("read", 100.0, 101.0), Span("score", 101.0, 103.0)])
    timeline.add("b", [Span("score", 101.0, 5000.0)])
    rows = timeline.rows
    assert timeline.width * NUM_INTERVALS >= 4900
    assert sum(rows["a"]["read"]) == pytest.approx(1.0)
    assert sum(rows["b"]["score"]) == pytest.approx(4899.0)
    assert max(rows["b"]["score"]) <= timeline.width * (1 + 1e-9)
    assert timeline.seconds["score"] == pytest.approx(4901.0)
    first = rows["a"]["read"][0] + rows["a"]["score"][0]
    assert first == pytest.approx(3.0)  # all of it is in the first interval by now


def test_a_clock_that_goes_behind_and_many_workers_are_taken():
    timeline = Timeline()
    for number in range(2 * MAX_WORKERS):
        timeline.add(f"worker {number}", [Span("read", 10.0 - number, 11.0)])
    assert len(timeline.rows) == MAX_WORKERS + 1
    assert sum(timeline.rows["other workers"]["read"]) == pytest.approx(MAX_WORKERS)
    assert Timeline().rows == {}
