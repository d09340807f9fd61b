import time

from onebasin.engines.clock import recording, spent_on


def test_time_inside_is_not_counted_outside():
    with recording() as seconds:
        with spent_on("score"):
            time.sleep(0.02)
            with spent_on("read"):
                time.sleep(0.05)
        time.sleep(0.01)
    assert 0.02 <= seconds["score"] < 0.05 <= seconds["read"]
    assert seconds["other"] >= 0.01


def test_an_outer_recording_counts_all():
    with recording() as outer, recording() as inner, spent_on("read"):
        pass
    assert not inner
    assert "read" in outer
    with spent_on("read"):  # nothing records
        pass
