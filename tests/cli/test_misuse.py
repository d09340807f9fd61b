"""What people get wrong at the terminal: one sentence that says what, the right exit code, and nothing written."""

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.attacks import check_refused
from tests.cli.cli_files import MLP

CASES = [
    (("merge", "a.safetensors", "text.txt", *MLP), 3, "text.txt is not a safetensors file"),
    (("merge", "a.safetensors", "missing.pt", *MLP), 3, "there is no file or folder missing.pt"),
    (("merge", "a.safetensors", "other.safetensors", *MLP), 3, "other.safetensors is not a checkpoint of this model"),
    (("merge", "a.safetensors", "p.safetensors", *MLP), 3, "in p.safetensors has shape (12,), the model has (12, 64)"),
    (("merge", "a.safetensors", ".", *MLP), 3, "the folder . holds no checkpoint"),
    (("merge", "a.safetensors", *MLP), 2, "merging needs at least two checkpoints"),
    (("merge", "a.safetensors", "b.pt", *MLP, "--recipe", "missing.yaml"), 3, "there is no file missing.yaml"),
    (("merge", "a.safetensors", "b.pt", *MLP, "--recipe", "b.pt"), 3, "b.pt is not YAML"),
    (("merge", "a.safetensors", "b.pt", *MLP, "--recipe", "."), 3, ". is a folder, not a file"),
    (("merge", "a.safetensors", "b.pt", *MLP, "--then", "ties"), 3, "and a.safetensors is none: leave out --then"),
    (("merge", "a.safetensors", "b.pt", *MLP, "--then", "best"), 2, "Invalid value for '--then': 'best' is not one of"),
    (
        ("merge", "a.safetensors", "b.pt", *MLP, "--out-dtype", "int8"),
        2,
        "Invalid value for '--out-dtype': 'int8' is",
    ),
    (
        ("align", "a.safetensors", "b.pt", *MLP, "--out-dtype", "int8"),
        2,
        "Invalid value for '--out-dtype': 'int8' is",
    ),
    (("apply", "p.safetensors", "a.safetensors", "--out-dtype", "int8"), 2, "Invalid value for '--out-dtype'"),
    (("apply", "garbage.safetensors", "a.safetensors"), 3, "garbage.safetensors is not a safetensors file"),
    (("apply", "text.txt", "a.safetensors"), 3, "text.txt is not a safetensors file"),
    (("apply", "other.safetensors", "a.safetensors"), 3, "is neither a onebasin permutation nor a onebasin transform"),
    (("apply", "p.safetensors", "other.safetensors"), 3, "other.safetensors is not a checkpoint of this model"),
    (("apply", "missing", "a.safetensors"), 3, "there is no file missing"),
]


@pytest.mark.parametrize(("command", "code", "message"), CASES)
def test_one_sentence(onebasin, attacked, command, code, message):
    (attacked / "text.txt").write_text("hello")
    (attacked / "garbage.safetensors").write_bytes(bytes(range(256)))
    save_file({"x": torch.zeros(3)}, attacked / "other.safetensors")
    assert message in check_refused(onebasin, attacked, *command, "-o", "out.pt")
    assert onebasin(*command, "-o", "out.pt").code == code


@pytest.mark.parametrize("command", [("merge", "a.safetensors", "b.pt"), ("align", "a.safetensors", "b.pt")])
def test_an_output_that_exists(onebasin, attacked, command):
    (attacked / "out.pt").write_text("mine")
    assert "out.pt exists already" in check_refused(onebasin, attacked, *command, *MLP, "-o", "out.pt")
