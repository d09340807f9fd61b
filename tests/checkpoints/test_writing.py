import pytest
import torch
from safetensors.torch import load_file, save_file

from onebasin.checkpoints import open_checkpoint, write_checkpoint
from tests.checkpoints.checkpoint_files import KINDS, STATE, make


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_written_as_it_was(kind, tmp_path):
    checkpoint = open_checkpoint(make(kind, tmp_path))
    assert checkpoint.keys() == STATE.keys()
    for key, value in STATE.items():
        assert checkpoint.shapes[key].shape == value.shape
        assert checkpoint.shapes[key].dtype == value.dtype
        assert torch.equal(checkpoint[key], value)
    out = tmp_path / ("out" if checkpoint.layout.is_folder else f"out{checkpoint.layout.path.suffix or '.pt'}")
    write_checkpoint(out, checkpoint.map(lambda key, value: value + 1), checkpoint)
    again = open_checkpoint(out)
    assert again.keys() == STATE.keys()
    for key, value in STATE.items():
        assert torch.equal(again[key], value + 1)
        assert again[key].dtype == value.dtype
    assert [file.name for file in again.layout.files] == [file.name for file in checkpoint.layout.files] or not out.is_dir()
    assert again.layout.container == checkpoint.layout.container


def test_what_is_written_is_read_by_the_libraries_themselves(tmp_path):
    checkpoint = open_checkpoint(make("safetensors", tmp_path))
    write_checkpoint(tmp_path / "o.safetensors", checkpoint, checkpoint)
    write_checkpoint(tmp_path / "o.pt", checkpoint, checkpoint)
    for found in (load_file(tmp_path / "o.safetensors"), torch.load(tmp_path / "o.pt", weights_only=True)):
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[key], value) for key, value in STATE.items())
    assert open_checkpoint(tmp_path / "o.safetensors").layout.metadata == {tmp_path / "o.safetensors": {"author": "me"}}
    empty = {"e": torch.empty(0, 3), "s": torch.tensor(1.5, dtype=torch.float16), "b": torch.tensor([True, False])}
    save_file(empty, tmp_path / "odd.safetensors")
    odd = open_checkpoint(tmp_path / "odd.safetensors")
    write_checkpoint(tmp_path / "odd2.safetensors", odd, odd)
    assert {k: v.tolist() for k, v in load_file(tmp_path / "odd2.safetensors").items()} == {
        "e": [],
        "s": 1.5,
        "b": [True, False],
    }


def test_a_view_does_not_take_its_whole_storage_along(tmp_path):
    torch.save({"w": torch.zeros(1000, 1000)}, tmp_path / "big.pt")
    checkpoint = open_checkpoint(tmp_path / "big.pt")
    rows = checkpoint.map(lambda key, value: value[:1000])
    write_checkpoint(tmp_path / "out.pt", rows, checkpoint)
    assert (tmp_path / "out.pt").stat().st_size < 1.01 * (tmp_path / "big.pt").stat().st_size
