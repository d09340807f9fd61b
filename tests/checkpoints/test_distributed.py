import os
import pickle
import warnings

import pytest
import torch

from onebasin.checkpoints import fit_names, open_checkpoint, write_checkpoint
from onebasin.engines.packing import pack, unpack

dcp = pytest.importorskip("torch.distributed.checkpoint")
STATE = {"fc1.weight": torch.randn(8, 4), "fc1.bias": torch.randn(8).bfloat16(), "steps": torch.tensor(3)}


def save(folder, content):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is saved by one process
        dcp.save(content, checkpoint_id=str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "dcp", {"model": STATE, "step": 5, "optim": {"state": torch.zeros(3)}})


def test_a_distributed_checkpoint_is_read_tensor_by_tensor(folder):
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint) == [f"model.{key}" for key in STATE]
    assert "optim.state" in checkpoint.notes[0]
    fitted = fit_names(checkpoint, STATE)
    for state in (fitted, unpack(pack(fitted)[0])):
        assert all(torch.equal(state[key], value) for key, value in STATE.items())
        assert all(state.shapes[key].dtype == value.dtype for key, value in STATE.items())


def test_pieces_of_a_tensor_are_put_together(tmp_path):
    """As FSDP saves them: each process its rows."""
    whole = torch.arange(24.0).reshape(6, 4)
    save(tmp_path / "dcp", {"w": whole[:2], "rest": whole[2:]})
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # our own
    entry = metadata.state_dict_metadata["w"]
    other = metadata.state_dict_metadata.pop("rest")
    entry.size = torch.Size([6, 4])
    entry.chunks.append(type(entry.chunks[0])(offsets=torch.Size([2, 0]), sizes=other.size))
    for index in [index for index in metadata.storage_data if index.fqn == "rest"]:
        place = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)("w", torch.Size([2, 0]), 1)] = place
    file.write_bytes(pickle.dumps(metadata))
    assert torch.equal(open_checkpoint(tmp_path / "dcp")["w"], whole)
    entry.size = torch.Size([7, 4])
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"pieces of w are missing.*dcp_to_torch"):
        open_checkpoint(tmp_path / "dcp")


class _Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


@pytest.mark.parametrize("content", [_Attack(), {"a": _Attack()}, 3, torch.zeros(2)])
def test_no_code_in_the_metadata_is_run(folder, content, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="is not that of a distributed checkpoint, or it is damaged"):
        open_checkpoint(folder)
    assert not (tmp_path / "attacked").exists()


def test_damage_and_missing_files_are_named(folder):
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        open_checkpoint(folder)


def test_a_missing_file_is_named(folder):
    checkpoint = open_checkpoint(folder)
    (file,) = folder.glob("*.distcp")
    file.write_bytes(b"\0" * file.stat().st_size)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ValueError, match="was changed"):
        checkpoint["model.steps"]
    with pytest.raises(ValueError, match="is damaged, or holds more than tensors"):
        open_checkpoint(folder)["model.steps"]
    file.unlink()
    with pytest.raises(FileNotFoundError, match="distcp is missing"):
        open_checkpoint(folder)


def test_it_is_not_written(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ValueError, match=r"read but not written.*dcp_to_torch"):
        write_checkpoint(tmp_path / "out", checkpoint, checkpoint)


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step5/mp_rank_00_model_states.pt"])
def test_partitions_of_zero_are_refused_with_the_conversion(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"partitions of DeepSpeed.*zero_to_fp32.py"):
        open_checkpoint(tmp_path)
