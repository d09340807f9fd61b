"""The process of the command before PyTorch is imported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onebasin as ob
from onebasin import startup

SOURCE = Path(ob.__file__).parent.parent
# What installers write for an entry point.
SCRIPT = "import sys\nfrom onebasin.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.fixture(params=["module", "script"])
def command(request, tmp_path) -> list[str]:
    """How to start the command: ``python -m onebasin``, or the script that is installed."""
    if request.param == "module":
        return [sys.executable, "-m", "onebasin"]
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "onebasin"
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


def start(command: list[str], folder: Path, *paths: Path) -> subprocess.Popen:
    path = os.pathsep.join(map(str, (*paths, SOURCE)))
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def interrupt(process: subprocess.Popen, marker: Path) -> tuple[str, str]:
    """Wait until a file is there, send Ctrl-C, and return what the process wrote."""
    try:
        end = time.monotonic() + 60
        while not marker.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("library", ["torch", "typer"])
def test_an_interrupt_during_imports_has_no_traceback(tmp_path, command, library):
    stuck, marker = tmp_path / "libraries", tmp_path / "importing"
    stuck.mkdir()
    code = f"import time\nopen({str(marker)!r}, 'w').close()\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    (stuck / f"{library}.py").write_text(code)  # it catches everything, as some libraries do
    process = start([*command, "inspect", "x", "--json"], tmp_path, stuck)
    out, err = interrupt(process, marker)
    assert process.returncode == startup.INTERRUPTED
    assert err == "error: interrupted; no output was left incomplete\n"
    assert json.loads(out) == {"error": startup.INTERRUPTION, "code": startup.INTERRUPTED}


def test_an_interrupt_in_a_factory_has_no_traceback(tmp_path):
    marker = tmp_path / "making"
    code = f"import time\ndef make():\n    open({str(marker)!r}, 'w').close()\n    time.sleep(60)\n"
    (tmp_path / "nets.py").write_text(code)
    process = start([sys.executable, "-m", "onebasin", "inspect", "nets:make"], tmp_path)
    _, err = interrupt(process, marker)
    assert process.returncode == startup.INTERRUPTED
    assert err == "error: interrupted; no output was left incomplete\n"


def test_the_working_folder_hides_no_library(tmp_path, command):
    hidden = ("torch", "numpy", "json", "safetensors", "signal", "typing", "typer", "scipy", "pathlib", "rich")
    for name in hidden:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nraise RuntimeError\n")
    (tmp_path / "layers.py").write_text("from torch import nn\nlinear = nn.Linear\n")
    code = (
        "import json, layers, numpy, safetensors.torch, torch\ndef make(): return layers.linear(3, 2), torch.zeros(1, 3)\n"
    )
    (tmp_path / "nets.py").write_text(code)
    process = start([*command, "inspect", "nets:make", "--json"], tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["num_hidden"] == 0
    assert not (tmp_path / "executed").exists()


def test_nothing_changes_for_those_who_import_the_library():
    handlers = "import signal, sys; before = sys.path[:], signal.getsignal(signal.SIGINT)"
    code = f"{handlers}\nimport onebasin\nassert before == (sys.path, signal.getsignal(signal.SIGINT))"
    process = start([sys.executable, "-c", code], SOURCE)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", ["sys.argv = []", "del sys.argv"])
def test_an_interpreter_without_arguments_can_import_the_library(arguments):
    """As one inside another program may be."""
    process = start([sys.executable, "-c", f"import sys\n{arguments}\nimport onebasin"], SOURCE)
    assert process.communicate() == ("", "")
    assert process.returncode == 0
