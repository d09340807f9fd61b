"""Runs that are killed at random, without a warning, while they write: inputs stay, outputs are whole or not there."""

import os
import random
import signal
import time

import pytest
from safetensors.torch import load_file

from tests.cli.cli_files import MLP, digest, load

FORMS = {
    "a file": ("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors"),
    "a PyTorch file": ("apply", "p.safetensors", "b.pt", "-o", "out.pt"),
    "a folder": ("apply", "p.safetensors", "model", "-o", "out"),
    "a merge": ("merge", "a.safetensors", "b.pt", "-o", "out.safetensors", *MLP, "--no-check"),
}


@pytest.fixture
def command(attacked):
    (attacked / "model").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (attacked / "model" / name).write_bytes((attacked / "a.safetensors").read_bytes())
    return attacked


def start(arguments: tuple[str, ...]) -> int:
    """Run the command in a child, slowed down at every step of writing, as if tensors were large."""
    child = os.fork()
    if child:
        return child
    from onebasin.checkpoints import weight_files, writing
    from onebasin.cli.app import run
    from onebasin.tensors import files

    def slow(function):
        def call(*given, **more):
            time.sleep(0.01)
            result = function(*given, **more)
            time.sleep(0.01)
            return result

        return call

    code = 99
    try:
        for module, name in ((weight_files, "_write_tensor"), (writing, "write_state"), (files.Path, "rename"),
                             (files.Path, "replace"), (files.shutil, "rmtree")):  # fmt: skip
            setattr(module, name, slow(getattr(module, name)))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = run(list(arguments))
    finally:
        os._exit(code)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_run_leaves_everything_whole(onebasin, command, form, force, seed):
    words = FORMS[form]
    out = command / words[words.index("-o") + 1]
    assert onebasin(*words).code == 0
    whole = digest(command)
    inputs = {name: content for name, content in whole.items() if not name.startswith("out")}
    if not force:
        for name in whole.keys() - inputs.keys():
            (command / name).unlink()
        for folder in (command / "out", command / "out.permutations"):
            if folder.is_dir():
                folder.rmdir()
    child = start((*words, *(["--force"] if force else [])))
    time.sleep(random.Random(seed).uniform(0, 0.4))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = digest(command)
    assert {name: content for name, content in after.items() if name in inputs} == inputs
    visible = {name: content for name, content in after.items() if not name.startswith(".") and name not in inputs}
    if out.suffix == ".pt" and out.exists():
        assert load(out).keys() == load(command / "b.pt").keys()  # an archive holds its own name, which was another
    elif out.exists():
        assert {name: content for name, content in visible.items() if name.endswith(".safetensors")}.items() <= whole.items()
        assert load_file(out / "model.safetensors" if out.is_dir() else out)
    hidden = [name for name in after if name.startswith(".")]
    assert all(name.startswith(".out") for name in hidden)
    assert onebasin(*words, "--force").code == 0
