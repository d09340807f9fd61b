import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onebasin as ob
from onebasin.checkpoints import check_output, open_checkpoint, write_checkpoint
from onebasin.checkpoints.moving import move_file
from onebasin.checkpoints.written_types import convert_configuration, convert_types, widen
from onebasin.tensors.states import read_state
from tests.checkpoints.checkpoint_files import KINDS, STATE, make


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_floating_tensors_alone_are_converted(tmp_path, kind, dtype):
    checkpoint = open_checkpoint(make(kind, tmp_path))
    out = tmp_path / ("out" if checkpoint.layout.is_folder else "out.pt")
    write_checkpoint(out, checkpoint, checkpoint, dtype=dtype)
    found = open_checkpoint(out)
    assert {key: value.dtype for key, value in found.shapes.items()} == {
        "fc.weight": dtype, "fc.bias": dtype, "n": STATE["n"].dtype,
    }  # fmt: skip
    assert all(torch.equal(found[key], value.to(found[key].dtype)) for key, value in STATE.items())
    for index in out.glob("*.index.json"):
        assert json.loads(index.read_text())["metadata"]["total_size"] == found.num_bytes


def test_numbers_that_are_too_large_are_refused(tmp_path):
    save_file({"w": torch.tensor([1.0, 1e6])}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"'w' holds numbers that are too large for torch.float16: take a wider type"):
        write_checkpoint(tmp_path / "b.safetensors", checkpoint, checkpoint, dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    endless = read_state({"mask": torch.tensor([0.0, -float("inf")])})
    assert convert_types(endless, torch.float16)["mask"].tolist() == [0.0, -float("inf")]


def test_the_space_that_is_needed_is_that_of_the_new_type(tmp_path, monkeypatch):
    import shutil

    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 4000, 5000))
    for dtype in (None, torch.float32, torch.float16):
        check_output(tmp_path / "b.pt", checkpoint, dtype=dtype)
    with pytest.raises(ValueError, match="are free there"):
        check_output(tmp_path / "b.pt", checkpoint, dtype=torch.float64)


def test_configurations_tell_the_type(tmp_path):
    content = {
        "dtype": "float32", "vision": {"torch_dtype": "bfloat16", "layers": 3}, "other": [{"dtype": "float32"}],
        "quantization_config": {"dtype": "float32"}, "torch_dtype": None, "dtype_of_rope": "float32",
    }  # fmt: skip
    converted = convert_configuration(content, torch.float16)
    assert converted == {**content, "dtype": "float16", "vision": {"torch_dtype": "float16", "layers": 3}}
    (tmp_path / "a").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "same", checkpoint, checkpoint)
    write_checkpoint(tmp_path / "half", checkpoint, checkpoint, dtype=torch.float16)
    assert (tmp_path / "same" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == converted


def test_results_are_rounded_once(tmp_path):
    """A transform of narrow weights, written in a wider type, is that of the widened weights."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).bfloat16()
    symmetry = ob.symmetry(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 4), kinds="positive")
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    move_file(transform, tmp_path / "a.pt", dtype=torch.float32).write(tmp_path / "b.pt")
    expected = transform.apply({key: value.float() for key, value in model.state_dict().items()})
    found = open_checkpoint(tmp_path / "b.pt")
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert widen(open_checkpoint(tmp_path / "a.pt"))["0.weight"].dtype == torch.float32


def test_quantised_models_and_optimizers_keep_their_types(tmp_path):
    model = nn.Linear(3, 2)
    permutation = ob.symmetry(model, torch.randn(1, 3)).identity()
    codes = {"weight": torch.ones(2, 3, dtype=torch.int8), "weight_scale": torch.ones(2), "bias": torch.ones(2)}
    save_file(codes, tmp_path / "q.safetensors")
    torch.save(torch.optim.SGD(model.parameters()).state_dict(), tmp_path / "o.pt")
    with pytest.raises(ValueError, match="is quantised, and its types must stay as they are"):
        move_file(permutation, tmp_path / "q.safetensors", dtype=torch.float32)
    with pytest.raises(ValueError, match="is the state of an optimiser"):
        move_file(permutation, tmp_path / "o.pt", dtype=torch.float32)
