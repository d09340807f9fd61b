"""A type checker knows the types and options of what is public, and finds misspelt ones."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Any, get_origin

import pytest
import torch

import onebasin as ob

CODE = """
import onebasin as ob
from torch import nn

a, b = nn.Linear(2, 2), nn.Linear(2, 2)
ob.align(b, to=a, method="sinkhorn", steps=3)
ob.align(b, to=a, method=ob.Sinkhorn(steps=3), init="weight-matching")
ob.align(b, to=a, method="sinkhron")  # wrong
ob.align(b, to=a, stepps=3)  # wrong
ob.align(b, to=a, start="bogus")  # wrong
ob.Sinkhorn(stepps=3)  # wrong
ob.align(b, to=a, init="magic")  # wrong
ob.merge([a, b], reference="last")  # wrong
ob.merge([a, b], restarts=2, steps=3, data=[])
ob.merge([a, b], stepps=3)  # wrong
ob.merge([a, b], to=a)  # wrong
one: nn.ReLU = ob.align(b, to=a).model  # wrong
other: nn.ReLU = ob.merge([a, b])  # wrong
ob.align(b, to=a, data=3)  # wrong
ob.linear_path(a, b, lambda model: "a word")  # wrong
"""

PROJECT = Path(__file__).parent / "user_project.py"


def check(folder: Path, mode: str) -> list[dict[str, Any]]:
    """The errors that pyright finds in a project; it sees the package under test as an installed one."""
    pytest.importorskip("pyright")
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": mode}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "use.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ob.__file__).parents[1])}
    printed = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment).stdout
    return [entry for entry in json.loads(printed)["generalDiagnostics"] if entry["severity"] == "error"]


def test_pyright_knows_the_options(tmp_path):
    (tmp_path / "use.py").write_text(CODE)
    wrong = {entry["range"]["start"]["line"] for entry in check(tmp_path, "standard")}
    assert wrong == {number for number, line in enumerate(CODE.splitlines()) if line.endswith("# wrong")}


@pytest.mark.parametrize("mode", ["basic", "strict"])
def test_a_project_of_a_user_is_typed(tmp_path, mode):
    shutil.copyfile(PROJECT, tmp_path / "use.py")
    assert check(tmp_path, mode) == []


def test_what_the_project_declares_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = runpy.run_path(str(PROJECT))
    declared = names["__annotations__"]
    assert {"aligned", "merged", "wider", "tuned"} <= declared.keys()
    for name, kind in declared.items():
        assert isinstance(names[name], kind if isinstance(kind, UnionType) else get_origin(kind) or kind), name
