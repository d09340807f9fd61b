import functools
import operator

import pytest
import torch

from onebasin.engines.packing import check_portable, pack, unpack
from onebasin.tensors.states import LazyState
from tests.engines.sharded_networks import make_states, write_shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_come_back(dtype):
    value = torch.arange(12).reshape(3, 4).to(dtype).T
    again = unpack(pack(value)[0])
    assert again.dtype == dtype
    assert torch.equal(again.float(), value.float())
    assert unpack(pack(torch.empty(0, 3))[0]).shape == (0, 3)
    again.zero_()  # it can be written to


def test_lazy_states_travel_without_their_tensors(tmp_path):
    state = {key: torch.randn(500, 500) for key in make_states()[0]}
    checkpoint = write_shards(tmp_path / "a", state)
    content, _ = pack(checkpoint.map(functools.partial(operator.contains, ())))
    assert len(content) < 20_000 < checkpoint.num_bytes
    again = unpack(pack(checkpoint.to("cpu", torch.float64))[0])
    assert type(again) is LazyState
    assert all(torch.equal(again[key], value.double()) for key, value in state.items())


def test_values_that_are_held_are_replaced_by_tokens():
    held = {"a": list(range(1000))}
    content, used = pack((held, 1), {id(held): "token"})
    assert used == ["token"]
    assert len(content) < 100
    assert unpack(content, {"token": held}.__getitem__) == (held, 1)
    assert pack(held, {id(held): "token"})[1] == []  # itself


def test_states_that_cannot_be_read_elsewhere_are_refused():
    with pytest.raises(ValueError, match="A is read by a function that cannot be sent"):
        check_portable(LazyState({}, lambda key: torch.zeros(1)), "A")
