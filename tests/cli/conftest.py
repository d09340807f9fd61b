"""Small checkpoints on disk, and a way to run the command line in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_files import write_pair


@dataclass(frozen=True)
class Ran:
    """What a run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def onebasin(capsys) -> Callable[..., Ran]:
    pytest.importorskip("typer")
    from onebasin.cli.app import run

    def call(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """a.safetensors and b.pt, a permuted copy; p.safetensors moves a to b."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write_pair(tmp_path)
    return tmp_path
