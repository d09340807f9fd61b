"""Places that must not be written to, names that are tricks, and links: refused in one sentence, and nothing is lost."""

import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.attacks import MARKER, check_refused
from tests.cli.cli_files import MLP

LONG = "x" * 256
OUTPUTS = {
    "the first input": "a.safetensors",
    "the second input": "b.pt",
    "an input through a link": "link.safetensors",
    "an input through a hard link": "hard.safetensors",
    "an input through a folder": "sub/../b.pt",
    "an input by its whole path": "{}/b.pt",
    "an input through a link of a folder": "way/b.pt",
    "a folder": "sub",
    "the working folder": ".",
    "the folder above": "..",
    "the root": "/",
    "in a file": "b.pt/x.pt",
    "in nothing": "none/x.pt",
    "in nothing above": "../none/x.pt",
    "a device": "/dev/null",
    "a link to a device": "null.pt",
    "a pipe": "pipe.pt",
    "another format": "x.exe",
    "no format": "x",
    "a hidden file without a format": ".x",
    "too long": f"{LONG}.pt",
    "a path that is too long": "/".join(["x" * 200] * 30) + "/x.pt",
    "a null byte": "x\x00.pt",
    "a place of the system": "/proc/x.pt",
    "a link that ends nowhere": "dangling/x.pt",
    "a link to itself": "loop/x.pt",
}
NAMES = {
    "nothing": "",
    "a null byte": "x\x00.pt",
    "too long": f"{LONG}.pt",
    "a link to itself": "loop",
    "a link that ends nowhere": "dangling",
    "the working folder": ".",
    "the root": "/",
    "the folder of processes": "/proc/self",
    "memory": "/proc/self/mem",
    "the environment": "/proc/self/environ",
    "a terminal": "/dev/tty",
    "random numbers": "/dev/urandom",
    "zeros": "/dev/zero",
    "a pipe": "pipe.pt",
    "an address": "https://example.org/x.pt",
    "an address of a hub": "hf://evil/evil",
    "a hub": "evil/evil",
    "a command": "$(touch executed)",
    "a command between quotes": "`touch executed`",
    "two commands": "x.pt; touch executed",
    "a pattern": "*.pt",
    "an option": "--help=x",
    "a secret": "../secret.json",
    "passwords": "/etc/passwd",
    "an empty folder": "empty",
    "a control": "\x1b[2Jx.pt",
}
FUNCTIONS = {
    "a path": "../trapped_nets:make",
    "a path of the system": "/etc/passwd:make",
    "relative": ".trapped_nets:make",
    "code": f"os:system('touch {MARKER}')",
    "code in the name": f"__import__('os').system('touch {MARKER}'):x",
    "a file": "trapped_nets.py:make",
    "nothing before": ":make",
    "nothing after": "trapped_nets:",
    "nothing": ":",
    "a lambda": "trapped_nets:<lambda>",
    "not there": "trapped_nets:none",
    "hidden": "trapped_nets:__builtins__",
    "no module": "none_of_that_name:make",
    "a null byte": "trapped_nets\x00:make",
    "a control": "\x1b[2J:make",
    "a number": "trapped_nets:value",
    "a folder": "sub:make",
}


@pytest.fixture
def traps(attacked):
    (attacked / "sub").mkdir()
    (attacked / "empty").mkdir()
    (attacked / "way").symlink_to(".")
    (attacked / "link.safetensors").symlink_to("a.safetensors")
    os.link(attacked / "a.safetensors", attacked / "hard.safetensors")
    (attacked / "null.pt").symlink_to("/dev/null")
    (attacked / "dangling").symlink_to("none")
    (attacked / "loop").symlink_to("loop")
    os.mkfifo(attacked / "pipe.pt")
    (attacked / "trapped_nets.py").write_text("value = 3\n")
    return attacked


@pytest.mark.parametrize("command", ["align", "merge"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(onebasin, traps, name, command):
    place = OUTPUTS[name].format(traps)
    check_refused(onebasin, traps, command, "a.safetensors", "b.pt", "-o", place, *MLP, "--no-check", "--force")


@pytest.mark.parametrize(
    "place", ["loop/x", "loop", "dangling", "dangling/x", "null.pt", "pipe.pt", "b.pt", "model", ".", LONG]
)
def test_folders_as_outputs(onebasin, traps, place):
    (traps / "model").mkdir()
    shutil.copy(traps / "a.safetensors", traps / "model" / "model.safetensors")
    merge = ("merge", "model", "b.pt", *MLP, "--no-check", "--force", "--report", "r.html")
    check_refused(onebasin, traps, *merge, "-o", place)


@pytest.mark.parametrize("option", ["--report", "--permutations"])
@pytest.mark.parametrize(
    "name",
    [
        "the first input", "the second input", "an input through a link", "in a file", "in nothing", "too long",
        "a null byte", "the root", "a link that ends nowhere",
    ],
)  # fmt: skip
def test_further_outputs(onebasin, traps, name, option):
    merge = ("merge", "a.safetensors", "b.pt", "-o", "out.pt", *MLP, "--no-check", "--force")
    check_refused(onebasin, traps, *merge, option, OUTPUTS[name])


@pytest.mark.parametrize("place", ["checkpoint", "permutation"])
@pytest.mark.parametrize("name", NAMES)
def test_inputs(onebasin, traps, name, place):
    given = ("p.safetensors", NAMES[name]) if place == "checkpoint" else (NAMES[name], "a.safetensors")
    line = check_refused(onebasin, traps, "apply", *given, "-o", "out.pt")
    assert "root:" not in line


@pytest.mark.parametrize("option", ["--model", "--data", "--loss"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(onebasin, traps, monkeypatch, name, option):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "trapped_nets", raising=False)
    given = {"--model": MLP[1], "--data": "cli_networks:batches", "--loss": "cross-entropy", option: FUNCTIONS[name]}
    words = [word for pair in given.items() for word in pair]
    check_refused(onebasin, traps, "barrier", "a.safetensors", "b.pt", *words)


@pytest.mark.parametrize("target", ["../../secret.json", "/etc/passwd", "/proc/self/environ", "/dev/zero", "loop", "."])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "model.safetensors.index.json"])
def test_links_in_a_folder(onebasin, traps, name, target):
    folder = traps / "model"
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / name).symlink_to(target)
    line = check_refused(onebasin, traps, "merge", "model", "model", "-o", "out")
    assert "root:" not in line


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b"3"])
def test_configurations_beside_an_adapter(onebasin, traps, name, content):
    folder = traps / "lora"
    folder.mkdir()
    save_file({"base_model.model.3.lora_A.weight": torch.zeros(2, 12)}, folder / "adapter_model.safetensors")
    (folder / name).write_bytes(content)
    (traps / "owner").mkdir()
    shutil.copy(traps / "p.safetensors", traps / "owner" / "permutation.safetensors")
    (traps / "owner" / "config.json").write_text("{}")
    check_refused(onebasin, traps, "apply", "owner/permutation.safetensors", "lora", "-o", "out")
