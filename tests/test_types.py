"""A type checker knows the options of methods, and finds misspelt ones."""

import json
import subprocess
import sys

import pytest

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
"""


def test_pyright_knows_the_options(tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "use.py").write_text(CODE)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "use.py"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout)
    wrong = {entry["range"]["start"]["line"] for entry in found["generalDiagnostics"] if entry["severity"] == "error"}
    assert wrong == {number for number, line in enumerate(CODE.splitlines()) if line.endswith("# wrong")}
