import os
import signal

import pytest

from onebasin.cli.engine_choice import choose_engine, close_engines, list_engine_facts
from onebasin.engines import LOCAL
from tests.cli.cli_files import write_llama


def test_options_that_do_not_fit_are_refused():
    assert choose_engine(None) is LOCAL
    assert list_engine_facts(LOCAL) == {}
    with pytest.raises(ValueError, match="--workers is for workers"):
        choose_engine(None, workers=2)
    assert choose_engine(None, memory="1GB").memory == 10**9
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
    assert "workers will hold" in " ".join(ran.record["engine"]["notes"])
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


def kill_while_writing(arguments, after):
    """Run a command in a child that is killed when it has begun to write a number of tensors."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    from onebasin.checkpoints import writing
    from onebasin.cli.app import run

    write, count = writing._write_tensor, 0

    def write_and_die(*given):
        nonlocal count
        count += 1
        if count > after:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given)

    try:
        writing._write_tensor = write_and_die
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        run([str(argument) for argument in arguments])
    finally:
        os._exit(0)


@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_killed_command_goes_on_from_what_it_had_done(onebasin, llamas, after):
    words = ("align", "a", "b", *LLAMA, "-o")
    assert onebasin(*words, "whole").code == 0
    kill_while_writing((*words, "out", "--engine", "local"), after)
    assert not (llamas / "out").exists()
    refused = onebasin(*words, "out", "--resume", "--seed", "1")
    assert refused.code == 3
    assert "its command differs" in refused.err
    ran = onebasin(*words, "out", "--resume", "--json")
    assert ran.code == 0
    assert ran.record["engine"]["recalled"] > 4
    assert read_weights(llamas / "out").keys() == {*read_weights(llamas / "whole")}
    assert read_weights(llamas / "out") == read_weights(llamas / "whole")
    assert {each.name for each in llamas.iterdir()} == {"a", "b", "whole", "out"}


def test_inputs_that_changed_are_not_gone_on_with(onebasin, llamas):
    words = ("apply", "whole/permutation.safetensors", "a", "-o", "out")
    assert onebasin("align", "a", "b", *LLAMA, "-o", "whole").code == 0
    kill_while_writing((*words, "--engine", "local"), 3)
    file = next((llamas / "a").glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    ran = onebasin(*words, "--resume")
    assert ran.code == 3
    assert "its inputs differs" in ran.err
    assert onebasin(*words, "--engine", "local").code == 0  # begins anew
    assert not list(llamas.glob(".*"))
