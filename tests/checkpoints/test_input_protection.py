"""No output is an input, lies in one or holds one, by whatever way it is named."""

import os
from pathlib import Path

import pytest
import torch

from onebasin.checkpoints import check_apart, open_checkpoint
from tests.checkpoints.checkpoint_files import STATE, write_sharded


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Inputs ``m``, a folder with shards, and ``a.pt``; other ways to them, and ``other``, a folder beside them."""
    monkeypatch.chdir(tmp_path)
    write_sharded(tmp_path / "m", ".safetensors")
    (tmp_path / "m" / "config.json").write_text("{}")
    torch.save(STATE, tmp_path / "a.pt")
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("m")
    (tmp_path / "shard").symlink_to("m/model-1.safetensors")
    (tmp_path / "m" / "away.html").symlink_to("../other/away.html")
    (tmp_path / "m" / "blob.json").symlink_to("../other/blob")
    (tmp_path / "other" / "blob").write_text("{}")
    (tmp_path / "m" / "folder").symlink_to("../other")
    os.link(tmp_path / "a.pt", tmp_path / "hard.pt")
    return tmp_path


REFUSED = (
    "m", "m/", "./m", "other/../m", "link", "m/new.html", "link/new.html", "m/sub/new.html", "m/config.json", "m/away.html",
    "m/model-1.safetensors", "m/model.safetensors.index.json", "shard", "other/../link/../m/x", "other/blob", "a.pt",
    "hard.pt", ".", "..", "other/..", "m/folder",
)  # fmt: skip


@pytest.mark.parametrize("target", REFUSED)
def test_inputs_are_refused(place, target):
    for path in (Path(target), place / target):
        with pytest.raises(ValueError, match=r"is, or lies in, or holds the input .*: inputs are never changed"):
            check_apart(path, [Path("m"), Path("a.pt")])


@pytest.mark.parametrize("target", ["new.pt", "m2", "other/new.html", "other", "m.html", "a.pt.html", "none/new.pt"])
def test_other_places_are_not(place, target):
    if target != "other":
        check_apart(Path(target), [Path("m"), open_checkpoint("m"), Path("a.pt")])
    check_apart(Path(target), [Path("a.pt")])


def test_a_folder_that_holds_what_an_input_links_to_is_refused(place):
    with pytest.raises(ValueError, match=r"holds the input m/blob\.json"):
        check_apart(Path("other"), [Path("m")])


def test_an_index_stands_for_its_shards(place):
    checkpoint = open_checkpoint(Path("m/model.safetensors.index.json"))
    for name in ("m/model-1.safetensors", "shard", "m/model.safetensors.index.json", "m"):
        with pytest.raises(ValueError, match="inputs are never changed"):
            check_apart(Path(name), [checkpoint])
    check_apart(Path("m/config.json"), [checkpoint])


def test_inputs_that_are_links_hold_their_place(place):
    with pytest.raises(ValueError, match="inputs are never changed"):
        check_apart(Path("."), [Path("shard")])
    with pytest.raises(ValueError, match="inputs are never changed"):
        check_apart(Path("m"), [Path("shard")])
