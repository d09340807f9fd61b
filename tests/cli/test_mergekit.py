"""Aligned models go straight into mergekit. It is run where it is installed (``make mergekit``)."""

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
import yaml

import onebasin as ob
from onebasin.checkpoints import open_models, write_checkpoint
from onebasin.cli import mergekit
from onebasin.cli.mergekit import MergekitRun, name_model
from tests.cli.cli_files import MLP, assert_same, digest, load, write_llama

COMMAND = os.environ.get("MERGEKIT") or shutil.which("mergekit-yaml")
WEIGHT_MATCHING = ("--method", "weight-matching")


@pytest.mark.skipif(COMMAND is None, reason="mergekit is not installed")
def test_aligned_folders_merge_to_the_first_network(tmp_path):
    for library in ("transformers", "typer"):
        pytest.importorskip(library)
    from benchmarks.peer_mergekit import run

    assert COMMAND is not None
    record = run(COMMAND, tmp_path)
    assert record["equal_tensors_aligned"] == record["tensors"]
    assert record["outputs_differ_aligned"] == 0.0
    assert record["outputs_differ_as_they_are"] > 0.1
    assert "config.json" in record["files"]
    assert record["methods"] == dict.fromkeys(("linear", "slerp", "ties", "dare_ties", "task_arithmetic"), 0.0)


def configure(method: str, **parameters) -> dict:
    models = [Path("a"), Path("b"), Path("c")][: 2 if method in ("slerp", "nuslerp", "nearswap", "arcee_fusion") else 3]
    weights = [0.5, 0.3, 0.2][: len(models)]
    return MergekitRun(method, models, weights, parameters, "bfloat16", Path("f"), Path("o")).configure(str)


def test_configurations_have_the_fields_of_their_methods():
    linear = configure("linear")
    assert [entry["parameters"] for entry in linear["models"]] == [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.2}]
    assert "base_model" not in linear
    assert linear["dtype"] == "bfloat16"
    ties = configure("ties", density=0.4)
    assert ties["base_model"] == "a"
    assert ties["models"] == [
        {"model": "a"},
        *({"model": m, "parameters": {"weight": w}} for m, w in (("b", 0.3), ("c", 0.2))),
    ]
    assert ties["parameters"] == {"normalize": False, "density": 0.4}
    assert configure("ties", normalize=True)["parameters"] == {"normalize": True}
    slerp = configure("slerp")
    assert slerp["parameters"] == {"t": 0.3}
    assert slerp["models"] == [{"model": "a"}, {"model": "b"}]
    assert configure("slerp", t=[0, 1])["parameters"] == {"t": [0, 1]}
    assert all("parameters" not in entry for entry in configure("model_stock")["models"])


def test_paths_are_no_names_of_the_hub():
    assert name_model(Path("/x/a")) == "/x/a"
    assert name_model(Path("/x/a+b@c")) == {"model": {"path": "/x/a+b@c"}}
    assert Path(name_model(Path("a"))).is_absolute()


@pytest.fixture
def pair(folder, monkeypatch):
    """Folders a, and b, a permuted copy of it; a mergekit-yaml that records how it was called and copies a model."""
    write_llama(folder / "a", 0)
    opened = open_models([folder / "a"])
    planted = opened.symmetry.random(torch.Generator().manual_seed(1))
    write_checkpoint(folder / "b", planted.apply(opened.checkpoints[0]), opened.checkpoints[0])
    (folder / "a" / "README.md").write_text("# Own text\n")
    (folder / "a" / "LICENSE").write_text("mine")
    monkeypatch.setattr(mergekit, "find_program", lambda: None)
    return folder


def install(folder: Path, monkeypatch, body: str) -> None:
    program = folder / "mergekit-yaml"
    program.write_text(f"#!{sys.executable}\nimport os, pathlib, shutil, sys\nconfig, out = sys.argv[1:3]\n{body}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mergekit, "find_program", lambda: str(program))


def test_without_mergekit_the_command_is_said(onebasin, pair):
    ran = onebasin(
        "merge", "a", "b", "-o", "m", "--then", "ties", *WEIGHT_MATCHING, "--seed", "3", "--then-set", "density=0.5"
    )
    assert ran.code == 0, ran.err
    assert "mergekit is not installed: pip install mergekit" in ran.err
    assert "mergekit-yaml m.mergekit.yaml m --random-seed 3" in " ".join(ran.out.split())
    assert not (pair / "m").exists()
    assert_same(load(pair / "m-aligned-2"), load(pair / "a"))
    assert "b, aligned to a by onebasin for a merge" in (pair / "m-aligned-2" / "README.md").read_text()
    moved = ob.Permutation.load(pair / "m.permutations" / "b.safetensors")
    assert_same(
        moved.apply(open_models([pair / "b"]).checkpoints[0]).load(), open_models([pair / "a"]).checkpoints[0].load()
    )
    written = yaml.safe_load((pair / "m.mergekit.yaml").read_text())
    assert written["base_model"] == str(pair / "a")
    assert written["models"][1]["model"] == str(pair / "m-aligned-2")
    assert written["parameters"]["density"] == 0.5
    assert written["dtype"] == "bfloat16"


def test_mergekit_is_run_offline_and_its_folder_gets_a_card(onebasin, pair, monkeypatch):
    install(pair, monkeypatch, "assert os.environ['HF_HUB_OFFLINE'] == '1'\nshutil.copytree('a', out, dirs_exist_ok=True)\n")
    command = ("merge", "a", "b", "-o", "m", "--then", "linear", *WEIGHT_MATCHING, "--json")
    ran = onebasin(*command)
    assert ran.code == 0, ran.err
    assert ran.record["mergekit"]["ran"] is True
    assert_same(load(pair / "m"), load(pair / "a"))
    card = (pair / "m" / "README.md").read_text()
    assert "They were merged by mergekit (linear)." in card
    assert "merge_method: linear" in card
    assert str(pair) not in card
    assert card.endswith("# Own text\n")
    assert (pair / "m" / "LICENSE").read_text() == "mine"
    before = digest(pair)
    assert onebasin(*command).code == 3
    assert digest(pair) == before
    assert onebasin(*command, "--force").code == 0


def test_a_failure_leaves_no_output(onebasin, pair, monkeypatch):
    install(pair, monkeypatch, "pathlib.Path(out, 'half').write_text('x')\nsys.exit('no such tensor')\n")
    ran = onebasin("merge", "a", "b", "-o", "m", "--then", "linear", *WEIGHT_MATCHING)
    assert ran.code == 3
    assert "mergekit failed: no such tensor; to see more, run mergekit-yaml" in " ".join(ran.err.split())
    assert not (pair / "m").exists()
    assert not list(pair.glob(".m.*"))


def test_with_changes_of_basis_the_first_model_is_written_too(onebasin, pair):
    ran = onebasin("merge", "a", "b", "-o", "m", "--then", "slerp", "--symmetry", "all", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["mergekit"]["models"] == ["m-aligned-1", "m-aligned-2"]
    for name, given in (("m-aligned-1", "a"), ("m-aligned-2", "b")):
        assert onebasin("verify", given, name, "--tolerance", "0.2").code == 0


def test_wrong_use_is_refused_before_any_work(onebasin, pair):
    common = ("merge", "a", "b", "-o", "m")
    for arguments, code, message in (
        (("--then-set", "density=0.5"), 2, "give --then too"),
        (("--then", "nonsense"), 2, "nonsense"),
        (("--then", "ties", "--then-set", "density"), 3, "write NAME=VALUE"),
        (("--then", "ties", "--repair", "norms"), 2, "leave out --repair"),
        (("--then", "ties", "--layer-weights", "*=1,0"), 2, "leave out --layer-weights"),
        (("--then", "model_stock"), 3, "at least two others"),
    ):
        ran = onebasin(*common, *arguments)
        assert ran.code == code
        assert message in " ".join(ran.err.split())
    three = onebasin("merge", "a", "b", "a", "-o", "m", "--then", "slerp")
    assert "slerp takes 2 models, not 3" in three.err
    assert "is none: leave out --then" in onebasin("merge", "a.safetensors", "b.pt", *MLP, "-o", "m", "--then", "linear").err
    assert not list(pair.glob("m*"))
