import hashlib
import itertools
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from onebasin.checkpoints import open_checkpoint
from onebasin.cli.console import Output
from onebasin.cli.engine_choice import choose_engine, close_engines, list_engine_facts
from onebasin.engines import LOCAL
from onebasin.tensors.files import load_tensors, pack_tensors
from tests.cli.cli_files import write_llama


def test_options_that_do_not_fit_are_refused():
    output = Output()
    assert choose_engine(output, None) is LOCAL
    assert list_engine_facts(LOCAL) == {}
    with pytest.raises(ValueError, match="--workers is for workers"):
        choose_engine(output, None, workers=2)
    assert choose_engine(output, None, memory="1GB").memory == 10**9
    assert choose_engine(output, None, resume=True) is not LOCAL
    close_engines()


LLAMA = ("--method", "weight-matching", "--no-check")


@pytest.fixture
def llamas(tmp_path, monkeypatch):
    """Two folders with many shards."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "a", 0)
    write_llama(tmp_path / "b", 1)
    return tmp_path


def read_weights(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".safetensors"}


def test_commands_write_the_same_bits_by_workers(onebasin, llamas):
    assert onebasin("align", "a", "b", "-o", "local", *LLAMA).code == 0
    ran = onebasin("align", "a", "b", "-o", "out", *LLAMA, "--engine", "processes", "--workers", "1", "--json")
    assert ran.code == 0
    assert read_weights(llamas / "out") == read_weights(llamas / "local")
    assert {"read", "score", "assign", "write"} <= ran.record["engine"]["seconds"].keys()
    assert "the worker will hold" in ran.err  # before the work begins
    assert "the worker will hold" in " ".join(ran.record["engine"]["notes"])
    assert not list(llamas.glob(".*"))


def test_what_does_not_fit_or_is_not_served_is_refused(onebasin, llamas):
    ran = onebasin("align", "a", "b", "-o", "out", *LLAMA, "--engine", "local", "--memory", "1MB")
    assert ran.code == 3
    assert "the limit is 0.00 GB" in ran.err
    ran = onebasin("align", "a", "b", "-o", "out", "--symmetry", "all", "--engine", "processes", "--no-check")
    assert ran.code == 3
    assert "permutations alone" in ran.err
    ran = onebasin("provenance", "a", "b", "--symmetry", "all", "--engine", "processes", "--no-check")
    assert ran.code == 3
    assert "loads both models" in ran.err
    ran = onebasin("align", "a", "b", "-o", "out", *LLAMA, "--resume")
    assert ran.code == 3
    assert "no journal" in ran.err
    assert {each.name for each in llamas.iterdir()} == {"a", "b"}


def kill_in(function, arguments, after=0):
    """Run a command in a child that is killed when it has called a function a number of times."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    from onebasin.cli.app import run

    try:
        with pytest.MonkeyPatch.context() as patch:
            called, count = pkgutil.resolve_name(function), itertools.count()

            def call_or_die(*given):
                if next(count) >= after:
                    os.kill(os.getpid(), signal.SIGKILL)
                return called(*given)

            patch.setattr(function, call_or_die)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            run([str(argument) for argument in arguments])
    finally:
        os._exit(0)


def kill_while_writing(arguments, after):
    """Run a command in a child that is killed when it has written a number of tensors."""
    kill_in("onebasin.checkpoints.weight_files._write_tensor", arguments, after)


@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_killed_command_goes_on_from_what_it_had_done(onebasin, llamas, after):
    words = ("align", "a", "b", *LLAMA, "-o")
    assert onebasin(*words, "whole").code == 0
    kill_while_writing((*words, "out", "--engine", "local"), after)
    assert not (llamas / "out").exists()
    refused = onebasin(*words, "out", "--resume", "--seed", "1")
    assert refused.code == 3
    assert "its option seed differs" in refused.err
    ran = onebasin(*words, "out", "--resume", "--json")
    assert ran.code == 0
    assert ran.record["engine"]["recalled"] > 4
    assert read_weights(llamas / "out").keys() == {*read_weights(llamas / "whole")}
    assert read_weights(llamas / "out") == read_weights(llamas / "whole")
    assert {each.name for each in llamas.iterdir()} == {"a", "b", "whole", "out"}


WORDS = ("align", "a", "b", *LLAMA, "-o", "out")


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """A command that was killed when it had decided all, and had written some shards; the journal lies aside."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_llama(folder / "a", 0)
        write_llama(folder / "b", 1)
        kill_while_writing((*WORDS[:-1], "whole", "--engine", "local"), 10**6)
        kill_while_writing((*WORDS, "--engine", "local"), 11)
    (folder / ".out.resume").rename(folder / "journal")
    return folder


@pytest.fixture
def killed(killed_once, monkeypatch):
    """The same, with a journal of its own for each test."""
    monkeypatch.chdir(killed_once)
    for name in ("out", ".out.resume", "elsewhere", "mine"):
        path = killed_once / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    shutil.copytree(killed_once / "journal", killed_once / ".out.resume")
    return killed_once


def list_records(folder):
    return sorted((folder / ".out.resume").glob("0*.safetensors"))


def list_shards(folder):
    return sorted((folder / ".out.resume" / "files of out").glob("*.safetensors"))


def change_values(file, change):
    """Rewrite a record, with a name that fits it: what no checksum can find."""
    tensors, header = load_tensors(file)
    content = pack_tensors(*change(tensors, header))
    file.unlink()
    number = file.name.partition("-")[0]
    (file.parent / f"{number}-{hashlib.sha256(content).hexdigest()}.safetensors").write_bytes(content)


def find_decision(folder):
    """The first record that holds a permutation."""
    return next(file for file in list_records(folder) if load_tensors(file)[0])


CHANGES = {
    "zeros": lambda tensors, header: ({k: torch.zeros_like(v) for k, v in tensors.items()}, header),
    "short": lambda tensors, header: ({k: v[..., :3] for k, v in tensors.items()}, header),
    "missing": lambda tensors, header: ({}, header),
    "floats": lambda tensors, header: ({k: v.double() for k, v in tensors.items()}, header),
    "no header": lambda tensors, header: (tensors, {}),
    "a word": lambda tensors, header: (tensors, {**header, "is_better": "yes"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_decisions_that_are_no_permutations_are_refused(onebasin, killed, change):
    change_values(find_decision(killed), CHANGES[change])
    ran = onebasin(*WORDS, "--resume")
    assert ran.code == 3
    assert "is damaged" in ran.err
    assert "begin anew without --resume" in ran.err
    assert not (killed / "out").exists()


def spoil_record(folder):
    find_decision(folder).write_bytes(b"x")


def spoil_shard(folder):
    list_shards(folder)[0].write_bytes(b"x")


def link_shard(folder):
    shard = list_shards(folder)[0]
    (folder / "elsewhere").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(folder / "elsewhere")


def link_stage(folder):
    stage = folder / ".out.resume" / "files of out"
    stage.rename(folder / "elsewhere")
    stage.symlink_to(folder / "elsewhere")


def link_configuration(folder):
    stage = folder / ".out.resume" / "files of out"
    (folder / "mine").write_text("precious")
    (stage / "config.json").unlink(missing_ok=True)
    (stage / "config.json").symlink_to(folder / "mine")


def add_file(folder):
    (folder / ".out.resume" / "files of out" / "extra.bin").write_bytes(b"shipped?")


def cut_fingerprint(folder):
    file = folder / ".out.resume" / "run.json"
    file.write_text(file.read_text()[:40])


ATTACKS = [spoil_record, spoil_shard, link_shard, link_stage, link_configuration, add_file, cut_fingerprint]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_damaged_journal_is_refused(onebasin, killed, attack):
    assert list_shards(killed)
    attack(killed)
    ran = onebasin(*WORDS, "--resume")
    assert ran.code == 3
    assert "is damaged" in ran.err
    assert "begin anew without --resume" in ran.err
    assert not (killed / "out").exists()
    if (killed / "mine").exists():
        assert (killed / "mine").read_text() == "precious"


def test_a_damaged_journal_can_be_begun_anew(onebasin, killed):
    spoil_shard(killed)
    assert onebasin(*WORDS, "--engine", "local").code == 0
    assert read_weights(killed / "out") == read_weights(killed / "whole")


def test_a_half_shard_without_a_record_is_written_again(onebasin, killed):
    shard = killed / ".out.resume" / "files of out" / "model-00003-of-00003.safetensors"
    shard.write_bytes(b"half")
    assert onebasin(*WORDS, "--resume").code == 0
    assert read_weights(killed / "out") == read_weights(killed / "whole")


def test_the_disk_needs_room_for_what_is_not_yet_written(onebasin, killed, monkeypatch):
    usage, needed = shutil.disk_usage(killed), open_checkpoint("b").num_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    assert onebasin(*WORDS, "--engine", "local").code == 3  # anew
    assert onebasin(*WORDS, "--resume").code == 0


@pytest.mark.parametrize("arguments", [("align", "a", "b", *LLAMA), ("merge", "a", "b", *LLAMA)])
def test_a_command_that_was_killed_behind_its_output_is_finished(onebasin, llamas, arguments):
    kill_in("onebasin.cli.engine_choice.Journal.remove", (*arguments, "-o", "out", "--engine", "local"))
    assert (llamas / "out").is_dir()
    assert (llamas / ".out.resume").is_dir()
    before = {file: file.stat().st_ino for file in (llamas / "out").glob("*.safetensors")}
    assert onebasin(*arguments, "-o", "out", "--engine", "local").code == 3  # it exists already
    assert onebasin(*arguments, "-o", "out", "--resume").code == 0
    assert not list(llamas.glob(".*"))
    assert before == {file: file.stat().st_ino for file in before}  # not written again


def test_inputs_that_changed_are_not_gone_on_with(onebasin, llamas):
    words = ("apply", "whole/permutation.safetensors", "a", "-o", "out")
    assert onebasin("align", "a", "b", *LLAMA, "-o", "whole").code == 0
    kill_while_writing((*words, "--engine", "local"), 3)
    file = next((llamas / "a").glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    ran = onebasin(*words, "--resume")
    assert ran.code == 3
    assert "its record of the inputs differs" in ran.err
    assert onebasin(*words, "--engine", "local").code == 0  # begins anew
    assert not list(llamas.glob(".*"))


def test_a_start_or_a_configuration_that_changed_is_not_gone_on_with(onebasin, llamas):
    assert onebasin("align", "a", "b", *LLAMA, "-o", "whole").code == 0
    start = llamas / "start.safetensors"
    shutil.copy(llamas / "whole" / "permutation.safetensors", start)
    words = (*WORDS, "--init", "start.safetensors")
    kill_while_writing((*words, "--engine", "local"), 3)
    start.write_bytes(start.read_bytes())
    ran = onebasin(*words, "--resume")
    assert ran.code == 3
    assert "its record of the inputs differs" in ran.err
    kill_while_writing((*WORDS, "--engine", "local"), 3)
    (llamas / "b" / "config.json").write_text((llamas / "b" / "config.json").read_text() + "\n")
    assert "its record of the inputs differs" in onebasin(*WORDS, "--resume").err


def test_another_torch_is_not_gone_on_with(onebasin, killed, monkeypatch):
    monkeypatch.setattr("onebasin.cli.engine_choice.metadata.version", lambda name: "2.99.0")
    assert "its version of torch differs" in onebasin(*WORDS, "--resume").err


def test_needs_are_told_and_refused_before_anything_is_read(onebasin, llamas, monkeypatch):
    read = []
    monkeypatch.setattr("onebasin.checkpoints.reading._SafetensorsReader._read", lambda *given: read.append(given))
    ran = onebasin(*WORDS, "--engine", "local", "--memory", "300MB")
    assert ran.code == 3
    assert "the limit is 0.30 GB" in ran.err
    assert not read


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_a_signal_ends_a_command_with_one_sentence(llamas, engine, number):
    if engine == "ray":
        pytest.importorskip("ray")
    words = [sys.executable, "-c", "from onebasin.cli import main; main()", *WORDS, "--engine", engine, "--workers", "1"]
    path = os.pathsep.join(place for place in sys.path if place)
    running = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not (llamas / ".out.resume" / "run.json").exists() and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said.strip().splitlines()[-1] == "error: interrupted; no output was left incomplete"
    assert not (llamas / "out").exists()


def test_folders_in_a_store_are_read_where_they_are(onebasin, llamas):
    words = ("align", f"file://{llamas / 'a'}", f"file://{llamas / 'b'}", *LLAMA, "-o")
    assert onebasin("align", "a", "b", "-o", "local", *LLAMA).code == 0
    kill_while_writing((*words, "out", "--engine", "local"), 5)
    ran = onebasin(*words, "out", "--resume", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["engine"]["recalled"] > 4
    assert read_weights(llamas / "out") == read_weights(llamas / "local")
    assert (llamas / "out" / "config.json").read_bytes() == (llamas / "local" / "config.json").read_bytes()
    kill_while_writing((*words, "again", "--engine", "local"), 5)
    os.utime(llamas / "a" / "config.json", (1, 1))
    refused = onebasin(*words, "again", "--resume")
    assert refused.code == 3
    assert "record of the inputs differs" in refused.err
    refused = onebasin("align", "a", "b", *LLAMA, "-o", "s3://bucket/out")
    assert refused.code == 3
    assert "s3://bucket/out cannot be written: give a local or shared folder" in refused.err
    refused = onebasin("merge", *words[1:-1], "-o", "merged", "--then", "linear")
    assert refused.code == 3
    assert "mergekit reads local folders, and a is in an object store: copy it first" in refused.err
