"""Damaged and hostile safetensors files, as checkpoints and as permutations, are refused in one sentence."""

import pytest

from tests.cli.attacks import check_refused
from tests.cli.cli_files import MLP
from tests.cli.damaged_safetensors import DAMAGES, unpack

COMMANDS = {
    "apply": ("apply", "p.safetensors", "x.safetensors", "-o", "out.safetensors"),
    "merge": ("merge", "a.safetensors", "x.safetensors", "-o", "out.safetensors", *MLP, "--no-check"),
    "verify": ("verify", "x.safetensors", "b.pt", *MLP),
    "as a permutation": ("apply", "x.safetensors", "a.safetensors", "-o", "out.safetensors"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(onebasin, attacked, damage, command):
    (attacked / "x.safetensors").write_bytes(DAMAGES[damage](*unpack(attacked / "a.safetensors")))
    line = check_refused(onebasin, attacked, *COMMANDS[command])
    assert "x.safetensors" in line


def test_files_that_are_not_damaged_are_taken(onebasin, attacked):
    (attacked / "x.safetensors").write_bytes((attacked / "a.safetensors").read_bytes())
    assert all(onebasin(*COMMANDS[name], "--force").code == 0 for name in ("apply", "merge"))
    assert onebasin(*COMMANDS["verify"]).code == 0
