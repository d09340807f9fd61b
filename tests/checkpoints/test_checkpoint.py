"""A checkpoint knows its files, its names and its types."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.checkpoint import Checkpoint, FileLayout
from tests.checkpoints.checkpoint_files import KINDS, STATE, make


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_several_files_are_folders(kind, tmp_path):
    assert open_checkpoint(make(kind, tmp_path)).layout.is_folder == (kind in ("shards", "torch shards", "index"))


def test_a_hugging_face_folder_has_a_configuration(tmp_path):
    file = tmp_path / "m.safetensors"
    layout = FileLayout(tmp_path, {file: ()})
    assert layout.is_folder
    assert layout.hugging_face_folder is None
    (tmp_path / "config.json").write_text("{}")
    assert layout.hugging_face_folder == tmp_path
    assert FileLayout(file, {file: ()}).hugging_face_folder is None


def test_tensors_are_read_when_they_are_asked_for():
    read: list[str] = []

    def hand_out(key: str) -> Tensor:
        read.append(key)
        return STATE[key]

    shapes = {key: value.to("meta") for key, value in STATE.items()}
    checkpoint = Checkpoint(shapes, hand_out, FileLayout(Path("m.pt"), {Path("m.pt"): tuple(STATE)}))
    assert checkpoint.path == Path("m.pt")
    assert checkpoint.dtypes == ["float32", "bfloat16", "int64"]
    assert checkpoint.names == {key: key for key in STATE}
    assert checkpoint.original is checkpoint
    assert read == []
    assert torch.equal(checkpoint["fc.weight"], STATE["fc.weight"])
    assert read == ["fc.weight"]
