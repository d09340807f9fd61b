import itertools
import time

import pytest

from onebasin.engines.clock import recording, spent_on


def total(spans, what):
    return sum(span.end - span.start for span in spans if span.what == what)


def test_time_inside_is_not_counted_outside(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with recording() as spans:
        with spent_on("score"):
            now += 2
            with spent_on("read"):
                now += 5
            now += 1
        now += 4
    assert [total(spans, what) for what in ("score", "read", "other")] == pytest.approx([3, 5, 4])
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))


def test_spans_are_in_the_time_of_day():
    begin = time.time()
    with recording() as spans, spent_on("read"):
        pass
    assert begin - 0.1 < spans[0].start <= spans[-1].end < time.time() + 0.1


def test_an_outer_recording_counts_all():
    with recording() as outer, recording() as inner, spent_on("read"):
        pass
    assert not inner
    assert "read" in {span.what for span in outer}
    with spent_on("read"):  # nothing records
        pass
