"""Small checkpoints on disk, and a way to run the command line in this process."""

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.attacks import SECRET
from tests.cli.cli_files import write_pair
from tests.cli.damaged_elements import write_transform


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


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """The same files, made once; not to be changed."""
    folder = tmp_path_factory.mktemp("pristine")
    write_pair(folder)
    write_transform(folder)
    return folder


@pytest.fixture
def attacked(pristine, tmp_path, monkeypatch) -> Path:
    """A copy of those files in the working folder, with a secret outside of it."""
    folder = tmp_path / "files"
    shutil.copytree(pristine, folder)
    (tmp_path / "secret.json").write_text(SECRET)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "500")
    return folder


@pytest.fixture
def offline(attacked, monkeypatch) -> Path:
    """The same folder, and no way out of the machine; the file "asked" appears beside the others if one is tried."""

    def refuse(*arguments, **more):
        (attacked / "asked").touch()  # which is seen, whatever becomes of the exception
        raise OSError("there is no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attacked
