import json

import pytest
import torch
from adapted_network import adapted
from safetensors.torch import save_file

from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.moving import move_file


def test_task_vectors_may_lack_tensors(tmp_path):
    model, _, permutation, _, _ = adapted()
    vector = {key: torch.randn_like(value) for key, value in model.state_dict().items() if not key.startswith("embed")}
    save_file(vector, tmp_path / "v.safetensors")
    with pytest.raises(ValueError, match=r"has no 'embed\.weight'"):
        move_file(permutation, tmp_path / "v.safetensors")
    move_file(permutation, tmp_path / "v.safetensors", kind="task-vector").write(tmp_path / "o.safetensors")
    moved = open_checkpoint(tmp_path / "o.safetensors").load()
    edited = {**model.state_dict(), **{key: model.state_dict()[key] + value for key, value in vector.items()}}
    state = permutation.apply(model)
    for key, value in permutation.apply(edited).items():
        torch.testing.assert_close(state[key] + moved[key] if key in moved else state[key], value)


def test_adapter_folders_keep_their_configuration(tmp_path):
    _, _, permutation, lora, _ = adapted()
    (tmp_path / "lora").mkdir()
    save_file(lora, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "fan_in_fan_out": False}))
    moved = move_file(permutation, tmp_path / "lora")
    assert moved.kind == "lora"
    moved.write(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    back = move_file(permutation.inverse(), tmp_path / "out")
    back.write(tmp_path / "back")
    found = open_checkpoint(tmp_path / "back")
    assert all(torch.equal(found[key], value) for key, value in lora.items())
    (tmp_path / "lora" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is not a configuration"):
        move_file(permutation, tmp_path / "lora")
