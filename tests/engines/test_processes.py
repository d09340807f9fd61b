import operator
import os
import signal
import time

import pytest

from onebasin.engines.processes import ProcessEngine, count_cores


@pytest.fixture(scope="module")
def engine():
    with ProcessEngine(workers=2) as running:
        yield running


def square(number: int) -> int:
    return number**2


def kill_first(place: str) -> str:
    """Dies as if by a lack of memory, but for the second time."""
    if not os.path.exists(place):
        open(place, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def print_and_sleep(number: int) -> int:
    print("what a task prints does not disturb answers")
    time.sleep(0.05 * (3 - number))
    return number


def test_results_are_in_order(engine):
    assert list(engine.map(print_and_sleep, [0, 1, 2, 3])) == [0, 1, 2, 3]
    assert engine.reduce(square, list(range(20)), operator.add) == sum(number**2 for number in range(20))
    assert len(engine.process_ids) <= 2


def test_few_tasks_are_under_way(engine):
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    results = engine.map(square, items())
    assert next(results) == 0
    assert len(taken) <= 2 * engine.workers
    results.close()


def test_the_task_of_a_killed_worker_is_repeated(engine, tmp_path):
    places = [str(tmp_path / str(number)) for number in range(4)]
    assert list(engine.map(kill_first, places)) == ["done"] * 4


def test_a_task_that_kills_every_worker_is_given_up(monkeypatch):
    monkeypatch.setattr("onebasin.engines.processes._MAX_DEATHS", 1)
    with ProcessEngine(1) as engine, pytest.raises(RuntimeError, match=r"1 workers died .* take fewer"):
        list(engine.map(os._exit, [3]))


def test_errors_of_tasks_are_raised_here(engine):
    with pytest.raises(TypeError, match="bad operand"):
        list(engine.map(abs, ["text"]))
    assert list(engine.map(abs, [-1])) == [1]


def test_workers_end_with_the_engine():
    engine = ProcessEngine(1)
    assert list(engine.map(abs, [-1])) == [1]
    (pid,) = engine.process_ids
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ValueError, match="at least 1"):
        ProcessEngine(0)
    assert count_cores() >= 1
