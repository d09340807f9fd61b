"""Files beside the weights: regular ones and blobs of the Hugging Face cache are copied, the rest is named."""

import os
import socket
from pathlib import Path

import pytest
from safetensors.torch import save_file

from onebasin.checkpoints import companion_files, find_companions, open_checkpoint, write_checkpoint
from onebasin.checkpoints.companion_files import copy_companion
from tests.checkpoints.checkpoint_files import STATE

SECRET = "a password"
HASHES = {"config.json": "a" * 40, "tokenizer.json": "b" * 64}


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder with a configuration, and a secret beside the folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(STATE, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (tmp_path / "secret.json").write_text(SECRET)
    return folder


@pytest.fixture
def cache(tmp_path) -> Path:
    """A snapshot in a cache as huggingface_hub lays it out."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, digest in HASHES.items():
        (repository / "blobs" / digest).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    save_file(STATE, repository / "blobs" / ("d" * 64))
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{'d' * 64}")
    return snapshot


def write_copy(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Reasons by name for what is left, and the names in a copy of the folder."""
    checkpoint, out = open_checkpoint(folder), folder.parent / "out"
    write_checkpoint(out, checkpoint, checkpoint)
    for file in out.iterdir():
        assert not file.is_symlink()
        assert SECRET.encode() not in file.read_bytes()
    return find_companions(checkpoint).left, sorted(file.name for file in out.iterdir())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("tokenizer.json", "/etc/passwd"),
        ("env.txt", "/proc/self/environ"),
        ("endless.txt", "/dev/zero"),
        ("vocab.txt", "../secret.json"),
        ("within.json", "config.json"),
        ("chain.json", "within.json"),
        ("dangling.json", "nothing"),
        ("loop.json", "loop.json"),
        ("folder.json", ".."),
        ("blob.json", f"../../blobs/{'a' * 40}"),
    ],
)
def test_links_are_left(model, name, target):
    (model / name).symlink_to(target)
    left, names = write_copy(model)
    assert left == {name: "a link"}
    assert names == ["config.json", "model.safetensors"]


def test_what_is_no_file_is_left(model, monkeypatch):
    os.mkfifo(model / "pipe.json")
    (model / "folder.json").mkdir()
    (model / "notes.md").write_text("")
    (model / "pytorch_model.bin.index.json").write_text("{}")
    monkeypatch.chdir(model)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
        left, names = write_copy(model)
    assert left == {
        "folder.json": "a folder",
        "pipe.json": "a pipe",
        "socket.txt": "a socket",
        "notes.md": "not needed to load it",
        "pytorch_model.bin.index.json": "not needed to load it",
    }
    assert names == ["config.json", "model.safetensors"]


def test_large_files_are_left(model, monkeypatch):
    monkeypatch.setattr(companion_files, "MAX_COMPANION_BYTES", 10)
    (model / "small.txt").write_text("x" * 10)
    (model / "large.txt").write_text("x" * 11)
    left, names = write_copy(model)
    assert list(left) == ["large.txt"]
    assert left["large.txt"].startswith("larger than")
    assert names == ["config.json", "model.safetensors", "small.txt"]


def test_files_that_claim_to_be_endless_are_not_read(model):
    with (model / "sparse.json").open("wb") as stream:
        stream.truncate(2**40)
    left, _ = write_copy(model)
    assert list(left) == ["sparse.json"]


def test_the_cache_of_the_hub_is_copied(cache):
    left, names = write_copy(cache)
    assert left == {}
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_link_to_a_snapshot_is_the_snapshot(cache, tmp_path):
    (tmp_path / "model").symlink_to(cache)
    left, names = write_copy(tmp_path / "model")
    assert left == {}
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def leave_repository(cache: Path) -> str:
    other = cache.parents[2] / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / ("e" * 40)).write_text(SECRET)
    return f"../../../models--other/blobs/{'e' * 40}"


def name_without_hash(cache: Path) -> str:
    (cache.parents[1] / "blobs" / "passwd").write_text(SECRET)
    return "../../blobs/passwd"


def link_in_place_of_a_blob(cache: Path) -> str:
    (cache.parents[2] / "secret").write_text(SECRET)
    (cache.parents[1] / "blobs" / ("e" * 40)).symlink_to("../../secret")
    return f"../../blobs/{'e' * 40}"


def pipe_in_place_of_a_blob(cache: Path) -> str:
    os.mkfifo(cache.parents[1] / "blobs" / ("e" * 40))
    return f"../../blobs/{'e' * 40}"


@pytest.mark.parametrize("make", [leave_repository, name_without_hash, link_in_place_of_a_blob, pipe_in_place_of_a_blob])
def test_what_only_imitates_a_blob_is_left(cache, make):
    (cache / "vocab.json").symlink_to(make(cache))
    left, names = write_copy(cache)
    assert left == {"vocab.json": "a link"}
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_blobs_behind_a_link_are_left(cache):
    blobs = cache.parents[1] / "blobs"
    blobs.rename(blobs.with_name("elsewhere"))
    blobs.symlink_to("elsewhere")
    left, names = write_copy(cache)
    assert left == dict.fromkeys(HASHES, "a link")
    assert names == ["model.safetensors"]


def test_a_file_that_was_exchanged_is_refused(model, tmp_path, monkeypatch):
    (model / "link.json").symlink_to("../secret.json")
    with pytest.raises(OSError, match=r"link\.json"):
        copy_companion(model / "link.json", tmp_path / "copy")
    os.mkfifo(model / "pipe.json")
    with pytest.raises(ValueError, match="no longer a regular file"):
        copy_companion(model / "pipe.json", tmp_path / "copy")
    monkeypatch.setattr(companion_files, "MAX_COMPANION_BYTES", 1)
    with pytest.raises(ValueError, match="has become larger"):
        copy_companion(model / "config.json", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_note_names_the_odd_ones_first(model):
    for number in range(9):
        (model / f"{number}.md").write_text("")
    (model / "tokenizer.json").symlink_to("/etc/passwd")
    (note,) = find_companions(open_checkpoint(model)).notes
    assert note.startswith("not copied into the output: tokenizer.json (a link), 0.md (not needed to load it), ")
    assert note.endswith(" and 2 more")


def test_single_files_have_no_companions(tmp_path):
    save_file(STATE, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert find_companions(open_checkpoint(tmp_path / "m.safetensors")).copied == {}


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "LICENCE.md", "license-apache.txt", "COPYING", "NOTICE"])
def test_texts_for_people_are_copied(model, name):
    (model / name).write_text("text")
    left, names = write_copy(model)
    assert name in names
    assert not left


def test_names_that_only_begin_so_are_left(model):
    for name in ("README.md/..", "LICENSE.safetensors.exe "):
        (model / name.replace("/", "_")).write_text("x")
    assert set(write_copy(model)[0]) == {"LICENSE.safetensors.exe ", "README.md_.."}
