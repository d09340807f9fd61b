"""The command where the extra is not installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import onebasin as ob


def test_one_module_of_ours_is_imported_by_name():
    """`tests/test_imports.py` sees import statements; this one waits until typer and rich are known to be there."""
    root = Path(ob.__file__).parent
    found = {
        str(file.relative_to(root)): re.findall(r"import_module\(\W*(onebasin[\w.]*)", file.read_text())
        for file in root.rglob("*.py")
    }
    assert {file: modules for file, modules in found.items() if modules} == {"cli/__init__.py": ["onebasin.cli.app"]}


def test_without_the_extra_there_is_one_sentence(tmp_path):
    for name in ("typer", "rich"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), str(Path(ob.__file__).parent.parent)])
    ran = subprocess.run(
        [sys.executable, "-m", "onebasin", "--help"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr == "the command line needs typer and rich: pip install 'onebasin[cli]'\n"
