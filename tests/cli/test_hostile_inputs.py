"""Inputs from strangers: links, pipes and devices in place of files are not read, and nothing of them gets out."""

import os
import shutil

import pytest

from tests.cli.cli_files import MLP, digest

ENDLESS = ("/dev/zero", "/dev/stdin", "pipe")
SECRET = b"a password that must not leave"


@pytest.fixture
def hostile(folder, monkeypatch):
    """The folder with a pipe, and a checkpoint whose folder has links to secrets."""
    os.mkfifo(folder / "pipe")
    (folder / "secret").write_bytes(SECRET)
    model = folder / "model"
    model.mkdir()
    shutil.copy(folder / "a.safetensors", model / "model.safetensors")
    links = {"tokenizer.json": "/etc/passwd", "env.txt": "/proc/self/environ"}
    links |= {"vocab.txt": "../secret", "x.json": "/dev/zero"}
    for name, target in links.items():
        (model / name).symlink_to(target)
    (model / "away").symlink_to("/")
    os.mkfifo(model / "pipe.json")
    (model / "special_tokens_map.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("apply", "p.safetensors", "model"),
        ("align", "a.safetensors", "model", *MLP),
        ("merge", "model", "b.pt", *MLP),
        ("canonical", "model", *MLP),
    ],
)
def test_secrets_stay_where_they_are(onebasin, hostile, command):
    ran = onebasin(*command, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    allowed = {"model.safetensors", "special_tokens_map.json", "permutation.safetensors", "README.md"}
    written = {file.name: file.read_bytes() for file in (hostile / "out").iterdir()}
    assert written.keys() <= allowed
    assert "special_tokens_map.json" in written
    for content in written.values():
        assert SECRET not in content
        assert b"root:" not in content
    for name in ("tokenizer.json", "env.txt", "vocab.txt", "x.json", "away", "pipe.json"):
        assert f"{name} (a " in ran.err
        assert any(f"{name} (a " in note for note in ran.record["notes"])


@pytest.mark.parametrize("place", ENDLESS)
@pytest.mark.parametrize(
    "command",
    [
        ("apply", "p.safetensors", "{}", "-o", "c.pt"),
        ("apply", "p.safetensors", "{}", "-o", "c.pt", "--kind", "optimizer"),
        ("apply", "{}", "a.safetensors", "-o", "c.pt"),
        ("align", "a.safetensors", "{}", "-o", "c.pt", *MLP),
        ("align", "a.safetensors", "b.pt", "-o", "c.pt", "--init", "{}", *MLP),
        ("merge", "a.safetensors", "{}", "-o", "c.pt", *MLP),
        ("canonical", "{}", "-o", "c.pt", *MLP),
        ("verify", "{}", "b.pt", *MLP),
        ("barrier", "{}", "b.pt", "--data", "digits", *MLP),
        ("barrier", "a.safetensors", "b.pt", "--data", "digits", "-p", "{}", *MLP),
        ("inspect", "{}"),
    ],
)
def test_what_never_ends_is_refused(onebasin, hostile, command, place):
    before = sorted(hostile.rglob("*"))
    ran = onebasin(*(part.format(place) for part in command))
    assert ran.code == 3, ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert sorted(hostile.rglob("*")) == before


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/environ", "pipe"])
def test_links_to_what_never_ends_are_refused(onebasin, hostile, name, target):
    (hostile / name).symlink_to(target)
    ran = onebasin("apply", "p.safetensors", name, "-o", "c.pt")
    assert ran.code == 3, ran.err
    assert not (hostile / "c.pt").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_pipes_in_a_folder_are_not_opened(onebasin, folder, name):
    (folder / "model").mkdir()
    os.mkfifo(folder / "model" / name)
    for command in (("apply", "p.safetensors", "model", "-o", "out"), ("inspect", "model")):
        assert onebasin(*command).code == 3


def test_a_configuration_of_a_terabyte_is_not_read(onebasin, folder):
    for name in ("config.json", "model.safetensors.index.json"):
        (folder / name).touch()
        os.truncate(folder / name, 2**40)
    before = {file: file.stat().st_size for file in folder.iterdir()}
    assert onebasin("inspect", "config.json").code == 3
    assert onebasin("apply", "p.safetensors", "model.safetensors.index.json", "-o", "out").code == 3
    assert {file: file.stat().st_size for file in folder.iterdir()} == before


def test_a_pipe_as_shard_is_refused(onebasin, folder):
    os.mkfifo(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "shard.safetensors"}}')
    assert "is missing" in onebasin("apply", "p.safetensors", "model.safetensors.index.json", "-o", "out").err
    (folder / "shard.safetensors").unlink()
    assert digest(folder).keys() == {"a.safetensors", "b.pt", "p.safetensors", "model.safetensors.index.json"}
