import operator
import time

import pytest

from onebasin.engines.memory_limits import MemoryEstimate
from onebasin.engines.ray_cluster import RayEngine, _check_answer


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'onebasin\[ray\]'"):
        RayEngine()


def test_workers_combine_in_the_same_tree(apart):
    letters = [chr(97 + number) for number in range(20)]
    assert apart.reduce(str.upper, letters, operator.add) == "".join(letters).upper()
    assert list(apart.map(str.upper, letters)) == [letter.upper() for letter in letters]


@pytest.fixture
def on_ray(apart):
    if apart.name != "ray":
        pytest.skip("of Ray alone")
    return apart


def test_more_than_a_machine_of_the_cluster_has_is_refused(on_ray):
    on_ray.memory = 10**18
    try:
        with pytest.raises(ValueError, match="of memory for a worker are needed, and no machine of the cluster has more"):
            on_ray.check_memory(MemoryEstimate(0, 10**15))
        with pytest.raises(ValueError, match="room in its object store"):
            on_ray.check_memory(MemoryEstimate(0, 10**6, results=10**15))
    finally:
        on_ray.memory = None


def test_the_limit_is_for_all_processes_of_this_machine(on_ray):
    on_ray.memory = 5 * 10**9
    try:
        with pytest.raises(ValueError, match=r"the limit is 5.00 GB: take 1 worker"):
            on_ray.check_memory(MemoryEstimate(10**9, 2 * 10**9))
    finally:
        on_ray.memory = None


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9", "127.0.0.1:99999", "no-such-host:6379"])
def test_an_address_at_which_nothing_answers_is_refused(address):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"no Ray cluster answers at .* as `ray start --head` printed it"):
        _check_answer(address)
    assert time.monotonic() - begin < 10


def test_words_in_place_of_an_address_are_left_to_ray():
    _check_answer("auto")
    _check_answer("local")
