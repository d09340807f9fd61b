"""Files are never half written, changed or lost; mistakes get one sentence and an exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.tensors.files import write_folder_atomically
from tests.cli.cli_files import MLP, digest

# A command line whose writer stops after one tensor of each file, so that it can be killed in the middle.
SLOW = """
import sys, time
from onebasin.checkpoints import weight_files
write_tensor = weight_files._write_tensor
def slow(stream, *rest):
    write_tensor(stream, *rest)
    stream.flush()
    open({marker!r}, "w").close()
    time.sleep(60)
weight_files._write_tensor = slow
from onebasin.cli import main
main()
"""


def heed_interrupts() -> None:
    """A shell's background jobs, of which the tests may be one, ignore them, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(folder):
    """Start a command line in a process of its own and wait until it is in the middle of writing."""
    pytest.importorskip("typer")
    script, marker = (folder.with_name(f"{folder.name}{ending}") for ending in (".slow.py", ".writing"))
    script.write_text(SLOW.format(marker=str(marker)))
    path = os.pathsep.join([str(Path(ob.__file__).parent.parent), str(Path(__file__).parent)])
    running = []

    def call(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, script, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
        )  # fmt: skip
        running.append(process)
        end = time.monotonic() + 60
        while not marker.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.02)
        return process

    yield call
    for process in running:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


@pytest.mark.parametrize("force", [False, True])
def test_a_killed_run_leaves_no_half_file_and_no_changed_input(start, onebasin, folder, force):
    if force:
        (folder / "out.safetensors").write_bytes(b"what was there")
    before = digest(folder)
    process = start("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors", *(["--force"] if force else []))
    process.send_signal(signal.SIGKILL)
    process.wait()
    after = digest(folder)
    assert {name: content for name, content in after.items() if not name.startswith(".")} == before
    assert onebasin("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors", "--force").code == 0


def test_a_killed_run_leaves_no_half_folder(start, onebasin, folder):
    (folder / "model").mkdir()
    (folder / "a.safetensors").rename(folder / "model" / "model.safetensors")
    assert onebasin("apply", "p.safetensors", "model", "-o", "copy").code == 0
    before = digest(folder)
    process = start("apply", "p.safetensors", "model", "-o", "copy", "--force")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {name: content for name, content in digest(folder).items() if not name.startswith(".")} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_cleans_up(start, folder, number):
    before = digest(folder)
    process = start("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "error: interrupted; no output was left incomplete\n"
    assert digest(folder) == before


def test_an_error_in_the_middle_of_writing_leaves_nothing(onebasin, folder, monkeypatch):
    from onebasin.checkpoints import weight_files

    def fail(*_):
        raise OSError(28, "No space left on device")

    before = digest(folder)
    monkeypatch.setattr(weight_files, "_write_tensor", fail)
    ran = onebasin("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors")
    assert ran.code == 3
    assert "No space left on device" in ran.err
    assert digest(folder) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_folder_that_could_not_be_replaced_is_still_there(tmp_path, monkeypatch, error):
    target, rename = tmp_path / "out", Path.rename
    target.mkdir()
    (target / "config.json").write_text("old")

    def stop(path, other):
        if path.name.endswith(".tmp"):
            raise error
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(error):
        write_folder_atomically(target, lambda folder: (folder / "config.json").write_text("new"), force=True)
    assert digest(tmp_path) == {"out/config.json": b"old"}
    monkeypatch.undo()
    write_folder_atomically(target, lambda folder: (folder / "config.json").write_text("new"), force=True)
    assert digest(tmp_path) == {"out/config.json": b"new"}


def spoil_with_nan(folder):
    state = torch.load(folder / "b.pt", weights_only=True)
    state["3.weight"][2, 2] = float("nan")
    torch.save(state, folder / "b.pt")


def cut_short(folder):
    content = (folder / "b.pt").read_bytes()
    (folder / "b.pt").write_bytes(content[: len(content) // 2])


def write_other(folder):
    save_file({"w": torch.zeros(2)}, folder / "other.safetensors")


BARRIER = ("barrier", "a.safetensors", "b.pt", *MLP, "--points", "2")
ALIGN = ("align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP)
MATCHING = ("--method", "weight-matching")


@pytest.mark.parametrize(
    ("arguments", "prepare", "code", "message"),
    [
        (("align", "a.safetensors", "nothing.pt", "-o", "c.pt", *MLP), None, 3, "there is no file or folder nothing.pt"),
        (("align", "a.safetensors", "b.pt", "-o", "c.pt"), None, 3, "do not tell their architecture: give it with --model"),
        (("align", "a.safetensors", "b.pt", "-o", "b.pt", "--force", *MLP), None, 3, "inputs are never changed"),
        (("align", "a.safetensors", "b.pt", "-o", "no/c.pt", *MLP), None, 3, "the folder no does not exist"),
        (("align", "a.safetensors", "b.pt", "-o", "c.txt", *MLP), None, 3, "cannot tell the format of c.txt"),
        (("align", "a.safetensors", "b.pt", "-o", "p.safetensors", *MLP), None, 3, "p.safetensors exists already"),
        ((*ALIGN, "-p", "p.safetensors"), None, 3, "p.safetensors exists already: it is replaced only by force"),
        ((*ALIGN, "-p", "c.pt"), None, 3, "every output needs a place of its own"),
        ((*ALIGN, "--report", "b.pt", "--force"), None, 3, "inputs are never changed"),
        (ALIGN, spoil_with_nan, 3, "'3.weight' of b.pt holds NaN or infinity"),
        (("align", "other.safetensors", "b.pt", "-o", "c.pt", *MLP), write_other, 3, "is not a checkpoint of this"),
        ((*ALIGN, *MATCHING, "--set", "steps=3"), None, 3, "'weight-matching' has no option 'steps'; it has max_sweeps"),
        ((*ALIGN, "--set", "order=up"), None, 3, "'sinkhorn' has no option 'order'"),
        ((*ALIGN, "--set", "steps=-1"), None, 3, "steps must be a whole number of at least 0, got -1"),
        ((*ALIGN, "--set", "steps"), None, 2, "cannot read 'steps': write NAME=VALUE"),
        ((*ALIGN, *MATCHING, "--set", "order=up"), None, 3, "order must be 'anchored' or 'random', got 'up'"),
        ((*ALIGN, "--method", "magic"), None, 2, "'magic' is not one of"),
        ((*ALIGN, "--objective", "midpoint"), None, 3, "runs the networks: give --data"),
        ((*ALIGN, "--init", "activation-matching"), None, 3, "runs the networks: give --data"),
        ((*ALIGN, "--loss", "odd"), None, 3, "there is no loss 'odd'"),
        ((*ALIGN, "--device", "nowhere"), None, 3, "cannot compute on 'nowhere'"),
        ((*ALIGN, "--init", "nothing"), None, 3, "is neither a file nor one of"),
        ((*ALIGN, "--init", "a.safetensors"), None, 3, "is neither a onebasin permutation nor a onebasin transform"),
        ((*ALIGN, "--groups", "x*", "--dry-run"), None, 3, "no group matches"),
        (ALIGN, cut_short, 3, "b.pt is not a PyTorch file, or it is damaged: PytorchStreamReader failed"),
        ((*ALIGN, "--data", "cli_networks:broken"), None, 3, "cli_networks:broken failed: RuntimeError: this"),
        ((*BARRIER, "--data", "cli_networks:odd_batches"), None, 3, "the networks cannot be run on this data"),
        ((*BARRIER, "--data", "cli_networks:batches", "--loss", "cli_networks:loss_of_an_object"), None, 3, "'logits'"),
        ((*BARRIER, "--data", "cli_networks:generator"), None, 3, "can be read once: give a list"),
        ((*ALIGN, "--data", "cli_networks"), None, 3, "write package.module:function"),
        ((*ALIGN, "--data", "cli_networks:not_callable"), None, 3, "is a int, not a function"),
        (("align", "a.safetensors", "b.pt", "-o", "c.pt", "-m", "cli_networks:broken"), None, 3, "this factory is broken"),
        (("merge", "a.safetensors", "-o", "c.pt", *MLP), None, 2, "at least two checkpoints"),
        (("merge", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--weights", "1,x"), None, 3, "cannot read --weights"),
        (("merge", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--weights", "1"), None, 3, "2 models and 1 weights"),
        (("merge", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--weights", "1,-1", "--dry-run"), None, 3, "a sum other"),
        (("merge", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--repair", "rescale"), None, 3, "--repair rescale runs"),
        (("barrier", "a.safetensors", "b.pt", *MLP), None, 2, "the loss is measured on data"),
        (("barrier", "a.safetensors", "b.pt", *MLP, "--data", "digits", "--loss", "odd"), None, 3, "there is no loss 'odd'"),
        (("barrier", "a.safetensors", "b.pt", *MLP, "--data", "digits", "--picture", "x.doc"), None, 3, "cannot draw x.doc"),
        (("apply", "a.safetensors", "b.pt", "-o", "c.pt"), None, 3, "a.safetensors is neither a onebasin permutation"),
        (("apply", "p.safetensors", "b.pt", "-o", "c.pt", "--kind", "optimizer"), None, 3, "is not the state dict of an"),
        (("apply", "p.safetensors", "other.safetensors", "-o", "c.pt", "--kind", "lora"), write_other, 3, "'w' is not part"),
        (("inspect", "nothing"), None, 3, "there is no model 'nothing'"),
        (("inspect", "torchvision"), None, 3, "there is no model 'torchvision'"),
        (("frobnicate",), None, 2, "No such command 'frobnicate'"),
        (("align", "a.safetensors", "-o", "c.pt"), None, 2, "Missing argument"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence(onebasin, folder, arguments, prepare, code, message):
    if prepare is not None:
        prepare(folder)
    before = digest(folder)
    ran = onebasin(*arguments)
    assert ran.code == code, ran.err
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert len(ran.err.strip().splitlines()) == 1
    assert ". " not in ran.err
    assert digest(folder) == before
    if code == 3:
        again = onebasin(*arguments, "--json")
        assert again.record["code"] == code
        assert message in again.record["error"]


def test_a_read_only_place_is_told_of(onebasin, folder):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (folder / "locked").mkdir(mode=0o500)
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "locked/c.pt")
    assert "cannot be written to" in ran.err


def test_a_report_that_cannot_be_drawn_is_refused_before_any_work(onebasin, folder, monkeypatch):
    before = digest(folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = onebasin(*ALIGN, "--report", "r.html")
    assert ran.code == 3
    assert "pip install 'onebasin[plots]'" in ran.err
    assert digest(folder) == before
