import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onebasin as ob
from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.moving import move_file
from tests.checkpoints.adapted_network import adapted


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
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "lora" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config.json is not a configuration"):
            move_file(permutation, tmp_path / "lora")


@pytest.fixture
def normed(tmp_path):
    """A network with a batch norm, its checkpoint, and a transform with scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    symmetry = ob.symmetry(model, torch.randn(2, 4), kinds="positive")
    return model, ob.Transform.random(symmetry, torch.Generator().manual_seed(0))


def test_models_and_task_vectors_are_transformed(tmp_path, normed):
    model, transform = normed
    moved = move_file(transform, tmp_path / "m.safetensors")
    assert moved.kind == "model"
    moved.write(tmp_path / "o.safetensors")
    found = open_checkpoint(tmp_path / "o.safetensors").load()
    for key, value in transform.apply(model).items():
        torch.testing.assert_close(found[key], value)
    vector = {key: torch.randn_like(value) for key, value in model.state_dict().items() if key.endswith("weight")}
    save_file(vector, tmp_path / "v.safetensors")
    move_file(transform, tmp_path / "v.safetensors", kind="task-vector").write(tmp_path / "w.safetensors")
    found = open_checkpoint(tmp_path / "w.safetensors").load()
    for key, value in transform.apply_difference(vector).items():
        torch.testing.assert_close(found[key], value)


def test_optimizers_do_not_follow_scales(tmp_path, normed):
    model, transform = normed
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    with pytest.raises(ValueError, match="cannot follow positive scales"):
        move_file(transform, tmp_path / "adam.pt")
    assert move_file(ob.Transform(transform.permutation, {}), tmp_path / "adam.pt").kind == "optimizer"
