import pytest
import torch

from onebasin.engines.memory_limits import Need, available_memory, check_memory, read_bytes


def test_sizes_are_read():
    assert read_bytes("1.5 gb") == 1.5e9
    for text in ("", "8 apples", "-1GB", "0", "1.2.3"):
        with pytest.raises(ValueError, match="write 8GB"):
            read_bytes(text)


def test_work_that_does_not_fit_is_refused_with_what_would():
    need = Need(driver=10**9, worker=2 * 10**9)
    assert check_memory(need, 2, True, 10**10) == "each of 2 workers will hold about 2.40 GB, and this process 1.40 GB"
    with pytest.raises(ValueError, match=r"8.60 GB together, and the limit is 7.00 GB: take 2 workers"):
        check_memory(need, 3, True, 7 * 10**9)
    with pytest.raises(ValueError, match="a machine with more memory"):
        check_memory(need, 1, False, 3 * 10**9)


def test_without_a_limit_what_is_free_counts():
    free = available_memory(torch.device("cpu"))
    if free is None:
        pytest.skip("not known here")
    check_memory(Need(0, 0), 1, False, None)
    with pytest.raises(ValueError, match="are free"):
        check_memory(Need(2 * free, 0), 1, False, None)
