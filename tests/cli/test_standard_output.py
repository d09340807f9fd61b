"""With ``--json``, standard output is one JSON object, whatever the code of the user prints."""

import json
import os
import subprocess
import sys

import pytest

import onebasin as ob

standard_output = pytest.importorskip("onebasin.cli.standard_output")

NETS = """
import atexit, ctypes, os, subprocess, sys
from cli_networks import batches, make_with_inputs, squared

def chatter(word):
    print("python", word)
    sys.__stdout__.write(f"dunder {word}\\n")
    os.write(1, f"descriptor {word}\\n".encode())
    subprocess.run(["echo", "child", word], check=True)
    ctypes.CDLL(None).printf(f"buffered {word}\\n".encode())

chatter("at import")
atexit.register(chatter, "at exit")

def make():
    chatter("in the factory")
    return make_with_inputs()

def data():
    chatter("in the data")
    return batches()

def loss(output, target):
    chatter("in the loss")
    return squared(output, target)
"""
PLACES = ("at import", "in the factory", "in the data", "in the loss", "at exit")


def test_json_has_no_infinity(capsys):
    with standard_output.reserved_for_result():
        standard_output.set_result({"error": "an earlier one"})
        standard_output.set_result({"a": float("inf"), "b": (1.5, float("nan")), "c": None})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None], "c": None}


def test_everything_else_goes_to_standard_error(capfd):
    with standard_output.reserved_for_result():
        print("python")
        os.write(1, b"descriptor\n")
        standard_output.set_result({"a": 1})
    print("after")
    captured = capfd.readouterr()
    assert captured.out == '{"a": 1}\nafter\n'
    assert sorted(captured.err.split()) == ["descriptor", "python"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_code_of_the_user_may_print(folder, is_refused):
    (folder / "nets.py").write_text(NETS)
    path = os.pathsep.join([os.path.dirname(os.path.dirname(ob.__file__)), os.path.dirname(__file__)])
    more = ["--picture", "x.svg", "--points", "2"] if not is_refused else ["--picture", "a.safetensors/x.svg"]
    ran = subprocess.run(
        [sys.executable, "-m", "onebasin", "barrier", "a.safetensors", "b.pt", "--model", "nets:make", "--data", "nets:data",
         "--loss", "nets:loss", "--json", *more],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == (3 if is_refused else 0), ran.stderr
    record = json.loads(ran.stdout)
    assert ("error" in record) == is_refused
    for how in ("python", "dunder", "descriptor", "child", "buffered"):
        for place in PLACES if not is_refused else ("at import", "at exit"):
            assert f"{how} {place}" in ran.stderr


EXITS = """
import sys
import cli_networks
from torch import nn

class Model(nn.Sequential):
    def forward(self, x):
        sys.exit(0)

def make():
    sys.exit(0)

def make_model():
    return Model(*cli_networks.make_mlp()), cli_networks.make_with_inputs()[1]

def loss(output, target):
    raise SystemExit

class Data(list):
    def __iter__(self):
        sys.exit("enough")

def data():
    return Data(cli_networks.batches())

make_data = make
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "exits:make"), "exits:make failed: it called sys.exit(0)"),
        (("--model", "leaves:make"), "cannot import leaves:make: it called sys.exit(0)"),
        (("--model", "exits:make_model"), "sys.exit(0)"),
        (("--data", "exits:make_data"), "exits:make_data failed: it called sys.exit(0)"),
        (("--data", "leaves:data"), "cannot import leaves:data: it called sys.exit(0)"),
        (("--data", "exits:data"), "the code of a model, its data or its loss called sys.exit('enough')"),
        (("--loss", "exits:loss"), "the code of a model, its data or its loss called sys.exit(None)"),
        (("--loss", "leaves:loss"), "cannot import leaves:loss: it called sys.exit(0)"),
    ],
)
def test_leaving_is_not_success(onebasin, folder, monkeypatch, options, message):
    (folder / "exits.py").write_text(EXITS)
    (folder / "leaves.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "exits", raising=False)
    arguments = {"--model": "cli_networks:make_with_inputs", "--data": "cli_networks:batches", "--loss": "cross-entropy"}
    arguments[options[0]] = options[1]
    words = [word for pair in arguments.items() for word in pair]
    ran = onebasin("barrier", "a.safetensors", "b.pt", *words, "--points", "2", "--json")
    assert ran.code == 3
    assert ran.record["code"] == 3
    assert message in ran.record["error"]
    assert ran.err == f"error: {ran.record['error']}\n"
