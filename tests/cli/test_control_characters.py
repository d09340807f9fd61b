"""Control characters in names of files, shards, tensors and groups never reach the terminal."""

import json
import os
import shutil
import unicodedata

import pytest
import torch
from safetensors.torch import load_file, save_file

import onebasin as ob
from tests.cli.cli_files import MLP

# ESC with a command that clears the screen, a bell, a return to the start of the line, a line that looks like ours, an
# eight-bit command, and a sign that reverses what follows.
ODD = "x\x1b[2J\x07\rerror: done\x9b31m\u202e\x7f\nwrote c.pt"


def check(ran) -> None:
    """Nothing but line ends, and none of those from a name."""
    for text in (ran.out, ran.err):
        found = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
        assert found <= {"\n"}, (found, text)
        assert not any(line.startswith("wrote c.pt") for line in text.splitlines())


@pytest.fixture
def odd(folder):
    """Checkpoints, a permutation and a folder under the odd name; a checkpoint and a permutation with odd names in them."""
    for name in ("a.safetensors", "p.safetensors", "b.pt"):
        shutil.copy(folder / name, folder / f"{ODD}{name}")
    state = load_file(folder / "a.safetensors")
    save_file({**state, ODD: torch.zeros(2)}, folder / "tensor.safetensors")
    (folder / ODD).mkdir()
    shutil.copy(folder / "a.safetensors", folder / ODD / "model.safetensors")
    (folder / ODD / f"{ODD}.json").symlink_to("/etc/passwd")
    index = {"weight_map": {"w": f"{ODD}.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    key = f"{ODD}.weight"
    symmetry = ob.Symmetry.from_axes({key: "h 4", "fc2.weight": "2 h"}, free=["h"])
    bound = symmetry.bind({key: torch.zeros(3, 4), "fc2.weight": torch.zeros(2, 3)})
    bound.identity().save(folder / "group.safetensors")
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("align", f"{ODD}a.safetensors", f"{ODD}b.pt", "-o", f"{ODD}c.pt", *MLP),
        ("align", f"{ODD}a.safetensors", f"{ODD}b.pt", "-o", f"{ODD}c.pt", *MLP, "--dry-run"),
        ("merge", f"{ODD}a.safetensors", f"{ODD}b.pt", "-o", f"{ODD}c.pt", *MLP),
        ("apply", f"{ODD}p.safetensors", ODD, "-o", f"{ODD}out"),
        ("apply", "p.safetensors", "tensor.safetensors", "-o", "d.pt", "--ignore", "x*"),
        ("canonical", ODD, "-o", f"{ODD}out", *MLP),
        ("verify", f"{ODD}a.safetensors", f"{ODD}b.pt", *MLP),
        ("barrier", "a.safetensors", f"{ODD}b.pt", "--data", "digits", "--points", "2", *MLP, "--picture", f"{ODD}.png"),
        ("inspect", "group.safetensors"),
        ("inspect", "group.safetensors", "--all"),
    ],
)  # fmt: skip
def test_what_is_done_is_shown_safely(onebasin, odd, command):
    ran = onebasin(*command)
    assert ran.code == 0, ran.err
    if "--all" in command:  # a table whose line ends cannot be told from those in a name
        assert "\x1b" not in ran.out
    else:
        check(ran)
    if command[0] != "verify" and "group.safetensors" not in command:  # these print no such name, or cut it off
        assert "\\x1b[2J" in ran.out + ran.err


@pytest.mark.parametrize(
    "command",
    [
        ("apply", "p.safetensors", f"{ODD}none.pt", "-o", "d.pt"),
        ("apply", "p.safetensors", "tensor.safetensors", "-o", "d.pt"),
        ("apply", "p.safetensors", "model.safetensors.index.json", "-o", "d"),
        ("apply", "group.safetensors", "a.safetensors", "-o", "d.pt"),
        ("apply", "p.safetensors", "b.pt", "-o", f"{ODD}b.pt"),
        ("align", "a.safetensors", "b.pt", "-o", "d.pt", "--model", ODD),
        ("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP, "--groups", ODD),
        ("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP, "--set", ODD),
        ("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP, "--method", ODD),
        ("inspect", ODD),
        (ODD,),
    ],
)
def test_errors_are_one_safe_line(onebasin, odd, command):
    ran = onebasin(*command)
    assert ran.code in (2, 3), ran.err
    check(ran)
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) == 1
    again = onebasin(*command, "--json")
    check(again)
    assert again.record["code"] == ran.code


def test_bytes_that_are_no_text(onebasin, folder):
    name = os.fsdecode(b"\xff\xfe.safetensors")
    try:
        shutil.copy(folder / "a.safetensors", folder / name)
    except OSError:
        pytest.skip("this file system takes text alone")
    ran = onebasin("apply", "p.safetensors", name, "-o", "c.safetensors")  # safetensors itself refuses such a name
    assert ran.code in (0, 3)
    check(ran)
    assert "\\udcff\\udcfe.safetensors" in ran.out + ran.err
