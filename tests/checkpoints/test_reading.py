import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import open_checkpoint
from onebasin.checkpoints.checkpoint import SAFETENSORS_TYPES
from onebasin.checkpoints.reading import FileVersion
from onebasin.tensors.comparison import check_finite
from tests.checkpoints.checkpoint_files import make, write_sharded


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, legacy):
    marker = tmp_path / "it ran"
    torch.save({"w": torch.zeros(2), "x": Payload(marker)}, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(marker)))
    for file in ("evil.pt", "plain.pt"):
        with pytest.raises(ValueError, match=r"would run code to be read, which is never done|is damaged"):
            open_checkpoint(tmp_path / file)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"save model.state_dict\(\) in it"):
        open_checkpoint(tmp_path / "module.pt")
    assert not marker.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert marker.exists()  # it would have


def refuse(path: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refusals(tmp_path):
    refuse(tmp_path / "nothing.pt", "there is no file or folder", FileNotFoundError)
    refuse(tmp_path, "holds no checkpoint: expected model.safetensors, ")
    for name in ("empty.safetensors", "empty.pt"):
        (tmp_path / name).touch()
        refuse(tmp_path / name, "is empty")
    for name in ("noise.safetensors", "noise.pt", "noise"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 9)
        refuse(tmp_path / name, "is not a .* file, or it is damaged|is damaged, or holds more")
    for kind in ("safetensors", "torch"):
        file = make(kind, tmp_path)
        file.write_bytes(file.read_bytes()[:-3])
        refuse(file, "damaged")
    (tmp_path / "pointer.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuse(tmp_path / "pointer.bin", "is a Git LFS pointer")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    refuse(tmp_path / "list.pt", "holds a list, not a state dict")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    refuse(tmp_path / "none.pt", "holds no tensors")
    save_file({}, tmp_path / "none.safetensors")
    refuse(tmp_path / "none.safetensors", "holds no tensors")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    refuse(tmp_path / "sparse.pt", "'w' in .* is not a plain tensor")
    torch.save({3: torch.eye(2)}, tmp_path / "keys.pt")
    refuse(tmp_path / "keys.pt", "it has the key 3")
    endless = [torch.eye(2)]
    endless.append(endless)
    torch.save({"w": torch.eye(2), "extra": endless}, tmp_path / "endless.pt")
    refuse(tmp_path / "endless.pt", "is nested too deeply")


def test_a_flipped_bit_in_a_torch_file_is_noticed(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "m.pt")
    content = bytearray((tmp_path / "m.pt").read_bytes())
    content[content.index(torch.ones(1000).numpy().tobytes()) + 1999] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    refuse(tmp_path / "m.pt", "checksum")


def test_damaged_indices(tmp_path):
    folder = write_sharded(tmp_path / "m", ".safetensors")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def refuse_index(content: object, message: str, error: type[Exception] = ValueError) -> None:
        index.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(error, match=message):
            open_checkpoint(folder)

    refuse_index("{", "is not an index of shards")
    refuse_index("[" * 100_000 + "]" * 100_000, "is not an index of shards, or it is damaged: .* is nested too deeply")
    refuse_index([], "is not an index of shards")
    refuse_index({"weight_map": {}}, "must name files beside it")
    refuse_index({"weight_map": {"n": "../other.safetensors"}}, "must name files beside it")
    refuse_index({"weight_map": {"n": "gone.safetensors"}}, "the shard gone.safetensors is missing", FileNotFoundError)
    moved = {**good["weight_map"], "fc.bias": "model-1.safetensors"}
    refuse_index({"weight_map": moved}, "which model.safetensors.index.json does not place there")
    refuse_index(
        {"weight_map": {**good["weight_map"], "more": "model-1.safetensors"}},
        "'more' in model-1.safetensors, which does not",
    )


@pytest.mark.parametrize("kind", ["safetensors", "torch", "shards"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, kind):
    path = make(kind, tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint["fc.weight"].shape == (2, 3)
    for file in checkpoint.layout.files:
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match="was changed while it was read"):
        checkpoint.load()


def test_a_file_that_becomes_shorter_at_the_wrong_time_is_noticed(tmp_path, monkeypatch):
    path = make("safetensors", tmp_path)
    checkpoint = open_checkpoint(path)
    monkeypatch.setattr(FileVersion, "check", lambda version: path.write_bytes(path.read_bytes()[:-40]))
    with pytest.raises(ValueError, match="became shorter while it was read"):
        checkpoint.load()


def test_every_type_of_safetensors_is_read(tmp_path):
    for dtype in SAFETENSORS_TYPES.values():
        tensors = {"w": torch.arange(24 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype).view(2, 3, 4)}
        tensors |= {"none": tensors["w"][:0], "one": tensors["w"][0, 0, 0]}
        save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "m.safetensors")
        found = open_checkpoint(tmp_path / "m.safetensors").load()
        for name, value in tensors.items():
            assert (found[name].dtype, found[name].shape) == (dtype, value.shape)
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_a_file_of_other_bytes_is_refused_in_words(tmp_path):
    file = tmp_path / "junk.pt"
    file.write_bytes(b"junk" * 10)
    with pytest.raises(ValueError, match=r"is not a PyTorch file, or it is damaged$"):
        open_checkpoint(file)


def test_a_tensor_without_axes_has_no_rows(tmp_path):
    save_file({"scale": torch.tensor(2.0), "w": torch.ones(3)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    assert not checkpoint.has_rows("scale")
    assert checkpoint.has_rows("w")
    check_finite({"a": checkpoint})
