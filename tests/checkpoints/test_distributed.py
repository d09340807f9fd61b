import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch

from onebasin.checkpoints import fit_names, open_checkpoint, write_checkpoint
from onebasin.checkpoints.distributed import _check_cover, _Piece
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


def test_a_piece_that_is_there_twice_is_refused(tmp_path):
    """The pieces have as many entries as the tensor, and would leave half of it to whatever is in memory."""
    save(tmp_path / "dcp", {"w": torch.ones(3, 4)})
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([6, 4])
    ((index, place),) = metadata.storage_data.items()
    again = type(index)("w", None, 7)
    metadata.storage_data[again] = place
    object.__setattr__(again, "offset", torch.Size([0, 0]))
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"pieces of w overlap.*dcp_to_torch"):
        open_checkpoint(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([((0, 0), (2, 2)), ((1, 0), (2, 2))], "overlap"),
        ([((0, 0), (2, 2)), ((3, 0), (2, 2))], "not inside"),
        ([((0, 0), (2, 2))], "missing"),
        ([((0,), (8,))], "not inside"),
        ([((0, 0), (2, 2)), ((0, 0), (2, 2))], "overlap"),
        ([((0, 0), (1, 2)), ((1, 0), (3, 1)), ((1, 1), (3, 1)), ((0, 0), (0, 2))], None),
    ],
)
def test_pieces_cover_a_tensor_once(pieces, said):
    found = [_Piece(Path("f"), 0, 1, offsets, sizes) for offsets, sizes in pieces]
    value = torch.empty(4, 2, device="meta")
    if said is None:
        _check_cover("w", value, found)
    else:
        with pytest.raises(KeyError, match=said):
            _check_cover("w", value, found)


def test_thousands_of_pieces_are_taken_if_they_are_rows():
    rows = [_Piece(Path("f"), 0, 1, (number, 0), (1, 2)) for number in range(3000)]
    _check_cover("w", torch.empty(3000, 2, device="meta"), rows[::-1])
    columns = [_Piece(Path("f"), 0, 1, (number, side), (1, 1)) for number in range(3000) for side in range(2)]
    with pytest.raises(KeyError, match="more pieces"):
        _check_cover("w", torch.empty(3000, 2, device="meta"), columns)


@pytest.mark.parametrize("others", [{}, {"step": 5, "optim": {"state": torch.zeros(3)}}])
def test_pieces_in_safetensors_format_are_read(tmp_path, others):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    writer = FileSystemWriter(tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": STATE, **others}, storage_writer=writer)
    checkpoint = open_checkpoint(tmp_path / "dcp")
    fitted = fit_names(checkpoint, STATE)
    for state in (fitted, unpack(pack(fitted)[0])):
        assert all(torch.equal(state[key], value) for key, value in STATE.items())
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(ValueError, match="cut short"):
        open_checkpoint(tmp_path / "dcp").load()
    place = content.index(b'"F32"')
    file.write_bytes(content[:place] + b'"I32"' + content[place + 5 :])
    with pytest.raises(ValueError, match="another shape or type"):
        open_checkpoint(tmp_path / "dcp")


def test_rows_of_single_processes_are_refused_with_the_conversion(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True))
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    for path in (tmp_path / "hf", file):
        with pytest.raises(ValueError, match=r"the rows of one process.*consolidate_safetensors_files"):
            open_checkpoint(path)


def test_the_folder_around_a_distributed_checkpoint_names_it(tmp_path):
    """As accelerate saves a model that FSDP has divided."""
    (tmp_path / "checkpoint-5").mkdir()
    save(tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0", {"model": STATE})
    with pytest.raises(ValueError, match=r"a folder inside .*give .*pytorch_model_fsdp_0"):
        open_checkpoint(tmp_path / "checkpoint-5")
    checkpoint = open_checkpoint(tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0")
    assert torch.equal(fit_names(checkpoint, STATE)["fc1.weight"], STATE["fc1.weight"])


@pytest.fixture
def one_process(tmp_path):
    """A group of processes that has one."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_models_that_fsdp_has_divided_are_read(one_process, tmp_path):
    """Both as it saves them: in pieces, and consolidated."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    expected = {key: value.detach().clone() for key, value in model.state_dict().items()}
    divided = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    whole = get_model_state_dict(divided, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch.save(whole, tmp_path / "pytorch_model_fsdp.bin")
    dcp.save({"model": get_model_state_dict(divided)}, checkpoint_id=str(tmp_path / "dcp"))
    for path in (tmp_path / "pytorch_model_fsdp.bin", tmp_path / "dcp"):
        found = fit_names(open_checkpoint(path), expected)
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    with pytest.raises(ValueError, match=r"if its file pytorch_model_fsdp.bin is one, give that"):
        open_checkpoint(_leave(tmp_path, "pytorch_model_fsdp.bin"))


def _leave(folder, name):
    """A folder with one of the files alone."""
    (folder / "alone").mkdir()
    (folder / name).rename(folder / "alone" / name)
    return folder / "alone"


def test_what_deepspeed_has_consolidated_is_read(tmp_path):
    """The files of zero_to_fp32.py, and a checkpoint of a stage that keeps parameters whole."""
    folder = tmp_path / "fp32"
    folder.mkdir()
    names = {key: f"pytorch_model-0000{number}-of-00003.bin" for number, key in enumerate(STATE, start=1)}
    for key, name in names.items():
        torch.save({key: STATE[key]}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": STATE, "dp_world_size": 2, "ds_version": "0.18", "buffer_names": []}, file)
    for path in (folder, file):
        checkpoint = open_checkpoint(path)
        assert all(torch.equal(checkpoint[key], value) for key, value in STATE.items())


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
