"""PyTorch files that hold code, or that are damaged: nothing in them is run, and they are refused in one sentence."""

import contextlib

import pytest
import torch

from tests.cli.attacks import MARKER, check_refused
from tests.cli.cli_files import MLP
from tests.cli.hostile_pickles import PICKLES, write

COMMANDS = {
    "apply": ("apply", "p.safetensors", "x.pt", "-o", "out.pt"),
    "apply to an optimiser": ("apply", "p.safetensors", "x.pt", "-o", "out.pt", "--kind", "optimizer"),
    "align": ("align", "a.safetensors", "x.pt", "-o", "out.pt", *MLP, "--no-check"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", PICKLES)
def test_nothing_is_run(onebasin, attacked, monkeypatch, name, command):
    write(attacked, name)
    monkeypatch.syspath_prepend(attacked)
    check_refused(onebasin, attacked, *COMMANDS[command])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["open in a container", "open while a dict is filled", "system in an archive"])
def test_the_files_are_hostile(attacked, name):
    """Otherwise the other tests would show nothing."""
    write(attacked, name)
    with contextlib.suppress(Exception):
        torch.load(attacked / "x.pt", weights_only=False)
    assert (attacked / MARKER).exists()
