import pytest
import torch

from onebasin.engines import make_engine
from onebasin.engines.memory_limits import (
    MemoryEstimate,
    _left_in_container,
    available_memory,
    check_device,
    check_host,
    read_bytes,
)


def test_sizes_are_read():
    assert read_bytes("1.5 gb") == read_bytes("1.5e+9") == 1.5e9
    for text in ("", "8 apples", "-1GB", "0", "1.2.3", "1e400"):
        with pytest.raises(ValueError, match="write 8GB"):
            read_bytes(text)


def test_work_that_does_not_fit_is_refused_with_what_would():
    need = MemoryEstimate(driver=6 * 10**8, worker=2 * 10**9, results=4 * 10**8)
    assert need.describe(2, True) == "each of 2 workers will hold about 2.40 GB, and this process 1.40 GB"
    check_host(need, 2, True, 10**10)
    with pytest.raises(ValueError, match=r"8.60 GB together, and the limit is 7.00 GB: take 2 workers"):
        check_host(need, 3, True, 7 * 10**9)
    with pytest.raises(ValueError, match=r"the limit is 4.00 GB: take 1 worker$"):
        check_host(need, 3, True, 4 * 10**9)
    with pytest.raises(ValueError, match="a machine with more memory"):
        check_host(need, 1, False, 3 * 10**9)


def test_both_engines_mean_the_same_limit():
    need = MemoryEstimate(driver=10**9, worker=2 * 10**9)
    with make_engine("processes", workers=3, memory=7 * 10**9) as engine:
        with pytest.raises(ValueError, match=r"the limit is 7.00 GB: take 2 workers"):
            engine.check_memory(need)
        engine.workers = 2
        engine.check_memory(need)


def test_without_a_limit_what_is_free_counts():
    free = available_memory(torch.device("cpu"))
    if free is None:
        pytest.skip("not known here")
    check_host(MemoryEstimate(0, 0), 1, False, None)
    with pytest.raises(ValueError, match="are free"):
        check_host(MemoryEstimate(2 * free, 0), 1, False, None)


def test_a_container_may_have_less_than_its_machine(tmp_path):
    assert _left_in_container(tmp_path, 5) == 5
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "700\n",
        "memory.stat": "anon 1\ninactive_file 300\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert _left_in_container(tmp_path, 5) == 600  # cached files give way
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_in_container(tmp_path, 5) == 5


def test_workers_that_share_a_gpu_are_counted():
    need = MemoryEstimate(0, 10**9, device=4 * 10**9)
    assert "4.60 GB of a GPU" in need.describe(2, True)
    check_device(need, 2, 10**10)
    with pytest.raises(
        ValueError, match=r"4 workers on one GPU will hold about 18.40 GB of it.*take 2 workers for each GPU"
    ):
        check_device(need, 4, 10**10)
    with pytest.raises(ValueError, match="take --device cpu"):
        check_device(need, 1, 10**9)
