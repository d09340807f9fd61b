import importlib.util

import pytest

from onebasin.engines import make_engine
from tests.engines.sharded_networks import make_states, make_symmetry, write_shards


@pytest.fixture(scope="package", params=["processes", "ray"])
def apart(request):
    """An engine with two workers, which all tests share: they take seconds to start."""
    if request.param == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with make_engine(request.param, workers=2) as engine:
        yield engine


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints in shards and their symmetry."""
    first, second = make_states()
    symmetry = make_symmetry().bind(first)
    return write_shards(tmp_path / "a", first), write_shards(tmp_path / "b", second), symmetry
