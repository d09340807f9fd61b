import operator

import pytest

from onebasin.engines.engine import LocalEngine
from onebasin.engines.journal import Journal
from onebasin.engines.memory_limits import MemoryEstimate


def test_the_local_engine_maps_and_reduces():
    engine = LocalEngine()
    assert list(engine.map(abs, [-1, 2])) == [1, 2]
    assert engine.reduce(abs, [-1, 2, -3], operator.add) == 6
    assert engine.seconds.keys() == {"other", "reduce"}
    with pytest.raises(ValueError, match="nothing to combine"):
        engine.reduce(abs, [], operator.add)


def test_memory_is_checked_unless_it_is_the_default():
    with pytest.raises(ValueError, match="the limit is"):
        LocalEngine(memory=10**6).check_memory(MemoryEstimate(10**9, 0))
    LocalEngine(memory=10**6, is_checked=False).check_memory(MemoryEstimate(10**9, 0))


def take_all(item, values=None):
    """Every value is right."""


def test_what_is_in_the_journal_is_not_computed_again(tmp_path):
    calls = []

    def work(item):
        calls.append(item)
        if item == 3 and len(calls) < 5:
            raise KeyboardInterrupt
        return {"value": item * 2}

    engine = LocalEngine()
    engine.journal = Journal(tmp_path / "j", {})
    engine.journal.begin()
    with pytest.raises(KeyboardInterrupt):
        list(engine.map_checkpointed(work, [1, 2, 3, 4], take_all))
    assert calls == [1, 2, 3]
    engine.journal = Journal(tmp_path / "j", {}, resume=True)
    calls[:] = [0] * 5
    assert [each["value"] for each in engine.map_checkpointed(work, [1, 2, 3, 4], take_all)] == [2, 4, 6, 8]
    assert calls[5:] == [3, 4]
    assert engine.checkpointed(lambda: {"value": 5}, take_all) == {"value": 5}


def test_progress_counts_what_is_done_and_what_is_taken_over(tmp_path):
    engine, told = LocalEngine(), []
    engine.journal = Journal(tmp_path / "j", {})
    engine.journal.begin()
    engine.journal.keep(1, {"value": 1})
    engine.journal = Journal(tmp_path / "j", {}, resume=True)
    engine.meter.expect("work", 4e6)
    with engine.meter.reporting(lambda *each: told.append(each)):
        list(engine.map_checkpointed(lambda item: {"value": item}, [1, 2], take_all, "work", lambda item: item * 1e6))
    assert told == [("work, MB", 1, 4), ("work, MB", 3, 4)]


def test_notes_are_told_at_once_and_once():
    engine, told = LocalEngine(memory=10**12), []
    engine.tell = told.append
    for _ in range(2):
        engine.check_memory(MemoryEstimate(0, 10**9))
    assert told == engine.notes == ["this process will hold about 1.40 GB"]
