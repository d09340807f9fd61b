import pickle
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.checkpoints import find_companions, open_checkpoint, write_checkpoint
from onebasin.checkpoints.hashing import hash_files
from onebasin.checkpoints.mirrors import mirror
from onebasin.checkpoints.remote_files import RemoteFile
from onebasin.engines.processes import ProcessEngine
from tests.checkpoints.checkpoint_files import STATE, write_sharded


@pytest.fixture
def folder(tmp_path):
    """Shards, a tokenizer, and what nobody needs."""
    made = write_sharded(tmp_path / "model", ".safetensors")
    (made / "tokenizer.json").write_text("{}")
    (made / "optimizer.pt").write_bytes(b"large")
    (made / "inner").mkdir()
    (made / "inner" / "config.json").write_text("{}")
    return made


@pytest.fixture(params=["memory", "file"])
def url(request, folder):
    if request.param == "file":
        yield f"file://{folder}"
        return
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/model", recursive=True)
    yield "memory://bucket/model"
    store.rm("/bucket", recursive=True)


def test_a_checkpoint_in_a_store_is_that_on_disk(url, folder, tmp_path):
    local = open_checkpoint(folder)
    for path in (url, f"{url}/", Path(url), f"{url}/model.safetensors.index.json"):
        remote = open_checkpoint(path)
        assert remote.notes == (
            f"read from {url}{'/model.safetensors.index.json' if 'index' in str(path) else ''} by byte ranges",
        )
        assert list(remote) == list(local)
        assert all(torch.equal(remote[key], value) for key, value in STATE.items())
        assert torch.equal(remote.read_rows("fc.weight", 1, 2), STATE["fc.weight"][1:2])
        assert hash_files(remote) == hash_files(local)
    again = pickle.loads(pickle.dumps(remote.read))
    assert torch.equal(again("fc.bias"), STATE["fc.bias"])
    assert set(find_companions(open_checkpoint(url)).copied) == {"tokenizer.json"}
    write_checkpoint(tmp_path / "copy", open_checkpoint(url), like=open_checkpoint(url))
    write_checkpoint(tmp_path / "local", local, like=local)
    assert hash_files(open_checkpoint(tmp_path / "copy")) == hash_files(open_checkpoint(tmp_path / "local"))


def test_tensors_are_read_by_their_bytes_alone(url, monkeypatch):
    remote = open_checkpoint(url)
    asked = []
    read = RemoteFile.read
    monkeypatch.setattr(RemoteFile, "read", lambda file, *more: (asked.append((file.url, *more)), read(file, *more))[1])
    assert torch.equal(remote["fc.bias"], STATE["fc.bias"])
    ((place, _, buffer),) = asked
    assert place == f"{url}/model-2.safetensors"
    assert len(buffer) == STATE["fc.bias"].nbytes


def test_no_file_is_left_that_could_be_taken_for_weights(url):
    with mirror(url) as found:
        assert {file.name for file in found.files} == {
            "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "tokenizer.json"
        }  # fmt: skip
        assert all(file.stat().st_size == origin.num_bytes for file, origin in found.files.items())
    assert {file.name for file in found.path.iterdir()} == {"model.safetensors.index.json", "tokenizer.json"}


def test_one_file_in_a_store(url, folder):
    remote = open_checkpoint(f"{url}/model-1.safetensors")
    assert not remote.layout.is_folder
    assert torch.equal(remote["fc.weight"], STATE["fc.weight"])


def test_what_is_not_read_from_a_store_is_refused(url, folder, tmp_path):
    for place, message in ((f"{url}/optimizer.pt", "holds no safetensors"), (f"{url}/inner", "holds no safetensors")):
        with pytest.raises(ValueError, match=message):
            open_checkpoint(place)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        open_checkpoint(f"{url}/none")
    local = open_checkpoint(folder)
    with pytest.raises(ValueError, match=f"{url}-out cannot be written: give a local or shared folder"):
        write_checkpoint(f"{url}-out", local, like=local)


def test_pipelines_and_damage_are_refused(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    save_file(STATE, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is a pipeline, which is not read from a store"):
        open_checkpoint(f"file://{tmp_path}")
    (tmp_path / "model_index.json").unlink()
    for content in (b"", b"1234567", b"\xff" * 40, b"version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"is empty|is damaged|Git LFS"):
            open_checkpoint(f"file://{tmp_path}")


def test_workers_read_where_the_files_lie(tmp_path):
    first = {"up.weight": torch.randn(24, 8), "down.weight": torch.randn(4, 24)}
    symmetry = ob.Symmetry.from_axes({"up.weight": "h i", "down.weight": "o h"}, free=["h"]).bind(first)
    planted = symmetry.random(torch.Generator().manual_seed(0))
    for name, state in (("a", first), ("b", dict(planted.apply(first)))):
        (tmp_path / name).mkdir()
        save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / name / "model.safetensors")
    a, b = (open_checkpoint(f"file://{tmp_path / name}") for name in "ab")
    with ProcessEngine(1, threads=1) as engine:
        result = ob.align(b, to=a, symmetry=symmetry, method="weight-matching", engine=engine)
        write_checkpoint(tmp_path / "out", result.model, b, engine=engine)
    assert result.permutation == planted.inverse()
    assert torch.equal(open_checkpoint(tmp_path / "out")["up.weight"], first["up.weight"])
