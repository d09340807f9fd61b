import contextlib
import importlib.util
import operator
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
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


JOIN = """
import sys
from onebasin.engines import make_engine
with make_engine("ray", address=sys.argv[1]) as engine:
    print(engine.workers, list(engine.map(abs, [-1, 2])))
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_cluster_that_is_there_is_joined_by_its_address():
    """It asks for a token, which both sides have in their environments."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path = os.pathsep.join(place for place in sys.path if place)
    environment = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = tempfile.mkdtemp(prefix="ray")  # with a short name, as sockets lie in it
    start = ["start", "--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false", "--block",
             "--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--disable-usage-stats"]  # fmt: skip
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *start]
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            time.sleep(0.5)
            with contextlib.suppress(ValueError):
                _check_answer(f"127.0.0.1:{port}")
                break
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"], env=environment, capture_output=True, text=True, timeout=180
        )
        assert joined.stdout.split("\n")[-2:] == ["1 [1, 2]", ""], joined.stderr
        assert head.poll() is None  # who joined a cluster does not end it
    finally:
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()
        shutil.rmtree(folder, ignore_errors=True)
