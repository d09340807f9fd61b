"""The command works where torchvision was built for CUDA and PyTorch was not, as in the environment that make builds.

There ``tests/test_readme.py`` runs ``onebasin inspect torchvision:resnet50``, and the other commands of the README.
"""

import importlib.util
from types import SimpleNamespace

import pytest

from onebasin.cli import torchvision_operators


@pytest.mark.parametrize(("version", "expected"), [("0.28.0+cu130", True), ("0.28.0", False), ("0.28.0+cpu", False)])
def test_the_version_tells_what_it_was_built_for(tmp_path, monkeypatch, version, expected):
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert torchvision_operators._is_built_for_cuda() is expected


def test_without_torchvision_nothing_is_declared(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torchvision_operators, "_libraries", [])
    torchvision_operators.declare_missing_operators()
    assert torchvision_operators._libraries == []
