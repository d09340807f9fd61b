"""A type checker knows the options of methods, and finds misspelt ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
"""


def test_pyright_knows_the_options(tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "use.py").write_text(CODE)
    package = Path(ob.__file__).parents[1]  # the one under test, not another that may be installed
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(package)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "use.py"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout)
    wrong = {entry["range"]["start"]["line"] for entry in found["generalDiagnostics"] if entry["severity"] == "error"}
    assert wrong == {number for number, line in enumerate(CODE.splitlines()) if line.endswith("# wrong")}
