import itertools
import time

from onebasin.engines.clock import recording, spent_on


def total(spans, what):
    return sum(span.end - span.start for span in spans if span.what == what)


def test_time_inside_is_not_counted_outside():
    begin = time.time()
    with recording() as spans:
        with spent_on("score"):
            time.sleep(0.02)
            with spent_on("read"):
                time.sleep(0.05)
        time.sleep(0.01)
    assert 0.02 <= total(spans, "score") < 0.05 <= total(spans, "read")
    assert total(spans, "other") >= 0.01
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert begin - 0.1 < spans[0].start <= spans[-1].end < time.time() + 0.1  # the time of day


def test_an_outer_recording_counts_all():
    with recording() as outer, recording() as inner, spent_on("read"):
        pass
    assert not inner
    assert "read" in {span.what for span in outer}
    with spent_on("read"):  # nothing records
        pass
