import importlib.util
import operator

import pytest

from onebasin.engines.memory_limits import Need
from onebasin.engines.ray_cluster import RayEngine


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'onebasin\[ray\]'"):
        RayEngine()


def test_workers_combine_in_the_same_tree(apart):
    letters = [chr(97 + number) for number in range(20)]
    assert apart.reduce(str.upper, letters, operator.add) == "".join(letters).upper()
    assert list(apart.map(str.upper, letters)) == [letter.upper() for letter in letters]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_more_than_a_machine_has_is_refused(apart):
    if apart.name == "ray":
        with pytest.raises(ValueError, match="no machine of the cluster has more"):
            apart.check_memory(Need(0, 10**15))
