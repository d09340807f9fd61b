import hashlib

import torch
from safetensors.torch import save_file

from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.hashing import hash_files


def test_hashes_are_those_of_the_weight_files(tmp_path):
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    content = (tmp_path / "model.safetensors").read_bytes()
    assert hash_files(open_checkpoint(tmp_path)) == {"model.safetensors": hashlib.sha256(content).hexdigest()}
