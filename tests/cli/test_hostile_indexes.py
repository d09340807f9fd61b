"""Indexes of shards that name files elsewhere, or that are damaged: nothing outside of the folder is read."""

import json
import os
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cli.attacks import check_refused
from tests.cli.cli_files import MLP

GOOD = "part.safetensors"
LONG = "x" * 300
FILES: dict[str, str] = {
    "above": "../secret.json",
    "far above": "../../../../../../../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "in a folder below": "sub/part.safetensors",
    "through the folder": "./part.safetensors",
    "out and in": "../files/model/part.safetensors",
    "of Windows": "..\\secret.json",
    "a drive": "C:\\secret.json",
    "a device of Windows": "con",
    "an address": "https://example.org/part.safetensors",
    "a device": "/dev/zero",
    "the environment": "/proc/self/environ",
    "the folder": ".",
    "the folder above": "..",
    "nothing": "",
    "blank": " ",
    "a null byte": "part\x00.safetensors",
    "a control": "\x1b[2J.safetensors",
    "reversed": "\u202esafetensors.trap",
    "too long": LONG,
    "much too long": "x" * 70_000,
    "the index itself": "model.safetensors.index.json",
    "the configuration": "config.json",
    "a link out": "link.safetensors",
    "a link to itself": "loop.safetensors",
    "a pipe": "pipe.safetensors",
    "missing": "none.safetensors",
    "of another case": "PART.SAFETENSORS",
    "a pattern": "*.safetensors",
    "a variable": "$HOME",
    "home": "~/part.safetensors",
    "half a surrogate": "\ud800.safetensors",
}
INDEXES: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b'{"weight_map": {"\xff": "a"}}',
    "null": None,
    "a list": [],
    "a number": 3,
    "no map": {},
    "a map that is null": {"weight_map": None},
    "a map that is a list": {"weight_map": ["part.safetensors"]},
    "a map that is text": {"weight_map": "part.safetensors"},
    "a map of nothing": {"weight_map": {}},
    "a map of numbers": {"weight_map": {"1.weight": 3}},
    "a map of lists": {"weight_map": {"1.weight": ["part.safetensors"]}},
    "a map of dicts": {"weight_map": {"1.weight": {"file": "part.safetensors"}}},
    "a map of nulls": {"weight_map": {"1.weight": None}},
    "mixed types": {"weight_map": {"1.weight": "part.safetensors", "2.weight": 7}},
    "a tensor that is not there": {"weight_map": {"none": GOOD}},
    "some of the tensors": {"weight_map": {"1.weight": GOOD}},
    "deep nesting": b'{"weight_map":' * 100_000,
    "infinity": b'{"weight_map": Infinity}',
    "another file in the map": b"<html>",
    "a pickle": b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch executed\x85R.",
}
COMMANDS = {
    "apply": ("apply", "p.safetensors", "model", "-o", "out"),
    "merge": ("merge", "model", "b.pt", "-o", "out", *MLP, "--no-check"),
}


@pytest.fixture
def model(attacked):
    """A folder with one shard, and other things that an index may name; the index is still missing."""
    folder = attacked / "model"
    folder.mkdir()
    shutil.copy(attacked / "a.safetensors", folder / GOOD)
    (folder / "sub").mkdir()
    shutil.copy(attacked / "a.safetensors", folder / "sub" / GOOD)
    (folder / "config.json").write_text("{}")
    (folder / "link.safetensors").symlink_to("../../secret.json")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    return folder


def write_index(folder, content: Any) -> None:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_files_elsewhere_are_not_read(onebasin, attacked, model, name, command):
    keys = sorted(load_file(attacked / "a.safetensors"))
    write_index(model, {"weight_map": {**dict.fromkeys(keys, GOOD), keys[0]: FILES[name]}})
    line = check_refused(onebasin, attacked, *COMMANDS[command])
    assert "root:" not in line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", INDEXES)
def test_damaged_indexes_are_refused(onebasin, attacked, model, name, command):
    write_index(model, INDEXES[name])
    check_refused(onebasin, attacked, *COMMANDS[command])


def test_a_good_index_is_taken(onebasin, attacked, model):
    write_index(model, {"weight_map": dict.fromkeys(load_file(attacked / "a.safetensors"), GOOD)})
    assert all(onebasin(*COMMANDS[command], "--force").code == 0 for command in COMMANDS)
