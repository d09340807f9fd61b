import functools
import operator

import pytest

from onebasin.engines.engine import FAN_IN, LocalEngine, Tree
from onebasin.engines.journal import Journal
from onebasin.engines.memory_limits import Need


def combine_as_a_tree(items):
    """The same shape, by levels."""
    while len(items) > 1:
        groups = [items[start : start + FAN_IN] for start in range(0, len(items), FAN_IN)]
        items = [functools.reduce(lambda a, b: (a, b), group) for group in groups]
    return items[0]


@pytest.mark.parametrize("count", [1, 2, 8, 9, 63, 64, 65, 448, 455, 456, 511, 512, 513, 600])
def test_the_shape_of_the_tree_depends_on_the_number_alone(count):
    tree = Tree(lambda a, b: (a, b))
    for number in range(count):
        tree.add(number)
    assert tree.finish() == combine_as_a_tree(list(range(count)))


def test_the_local_engine_maps_and_reduces():
    engine = LocalEngine()
    assert list(engine.map(abs, [-1, 2])) == [1, 2]
    assert engine.reduce(abs, [-1, 2, -3], operator.add) == 6
    assert engine.seconds.keys() == {"other"}
    with pytest.raises(ValueError, match="nothing to combine"):
        engine.reduce(abs, [], operator.add)


def test_memory_is_checked_unless_it_is_the_default():
    with pytest.raises(ValueError, match="the limit is"):
        LocalEngine(memory=10**6).check_memory(Need(10**9, 0))
    LocalEngine(memory=10**6, is_checked=False).check_memory(Need(10**9, 0))


def test_what_is_remembered_is_not_computed_again(tmp_path):
    calls = []

    def work(item):
        calls.append(item)
        if item == 3 and len(calls) < 5:
            raise KeyboardInterrupt
        return {"value": item * 2}

    engine = LocalEngine()
    engine.journal = Journal(tmp_path / "j", {})
    with pytest.raises(KeyboardInterrupt):
        list(engine.map_remembered(work, [1, 2, 3, 4]))
    assert calls == [1, 2, 3]
    engine.journal = Journal(tmp_path / "j", {}, resume=True)
    calls[:] = [0] * 5
    assert [each["value"] for each in engine.map_remembered(work, [1, 2, 3, 4])] == [2, 4, 6, 8]
    assert calls[5:] == [3, 4]
    assert engine.remember(lambda: {"value": 5}) == {"value": 5}
