import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.weight_files import find_format, write_safetensors
from onebasin.symmetries import Symmetry
from onebasin.tensors import row_blocks


def test_formats_are_told_by_endings(tmp_path):
    assert find_format(tmp_path / "a.safetensors") == "safetensors"
    assert find_format(tmp_path / "a.ckpt") == "torch"
    with pytest.raises(ValueError, match="cannot tell the format"):
        find_format(tmp_path / "a.onnx")


def test_large_tensors_are_written_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(row_blocks, "MAX_ENTRIES", 200)
    state = {"embed": torch.randn(100, 6).bfloat16(), "up": torch.randn(80, 6), "count": torch.tensor(3)}
    save_file(state, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    symmetry = Symmetry.from_axes({"embed": "v s", "up": "h s"}, ["s", "h"], state)
    moved = symmetry.random(torch.Generator().manual_seed(0)).apply(checkpoint)
    assert moved.has_rows("embed")
    assert not moved.has_rows("up")
    digest, asked = hashlib.sha256(), []
    read = type(checkpoint.read).read_rows
    monkeypatch.setattr(
        type(checkpoint.read), "read_rows", lambda self, key, *rows: asked.append((key, *rows)) or read(self, key, *rows)
    )
    write_safetensors(tmp_path / "b.safetensors", moved, {"format": "pt"}, digest)
    assert asked == [("embed", 0, 32), ("embed", 32, 64), ("embed", 64, 96), ("embed", 96, 100)]
    assert digest.hexdigest() == hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    assert all(torch.equal(value, moved[key]) for key, value in load_file(tmp_path / "b.safetensors").items())
