import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from cli_files import digest, write_llama
from cli_networks import batches, make_conv, make_mlp, make_with_inputs
from safetensors.torch import load_file, save_file

import onebasin as ob
from onebasin.checkpoints import open_checkpoint
from onebasin.landscape.evaluation import mean_loss

MLP = ("--model", "cli_networks:make_with_inputs")


def load(path: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(path).load()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("method", ["weight-matching", "sinkhorn", "ste"])
def test_align_finds_the_planted_permutation(onebasin, folder, method):
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--method", method)
    assert ran.code == 0
    assert "2 groups; 24 of 24 hidden units free" in ran.out
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))
    planted = ob.Permutation.load(folder / "p.safetensors")
    assert ob.Permutation.load(folder / "c.permutation.safetensors") == planted.inverse()


def test_align_with_data(onebasin, folder):
    data = ("--data", "cli_networks:batches")
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, *data, "--method", "activation-matching")
    assert ran.code == 0
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))
    arguments = (*MLP, *data, "--method", "sinkhorn", "--objective", "midpoint", "--loss", "cli_networks:squared")
    ran = onebasin(
        "align", "a.safetensors", "b.pt", "-o", "d.pt", *arguments, "--set", "steps=3", "--init", "p.safetensors", "--json"
    )
    assert ran.code == 0
    assert ran.record["cost"] <= ran.record["start_cost"]
    assert {"step", "soft", "hard"} <= ran.record["history"][0].keys()


def test_align_speaks_json_and_nothing_else(onebasin, folder):
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "c.safetensors", "-p", "q.safetensors", *MLP, "--json")
    assert ran.record["cost"] == 0.0
    assert ran.record["start_cost"] > 0
    assert ran.record["converged"]
    assert ran.record["permutation"] == "q.safetensors"
    assert_same(load_file(folder / "c.safetensors"), load(folder / "a.safetensors"))
    assert len(ran.out.splitlines()) == 1


def test_prefixes_are_reported_and_kept(onebasin, folder):
    wrapped = {f"module.{key}": value for key, value in load(folder / "b.pt").items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, folder / "w.ckpt")
    ran = onebasin("align", "a.safetensors", "w.ckpt", "-o", "c.ckpt", *MLP, "--json")
    assert ran.code == 0
    assert any("begin with 'module.'" in note for note in ran.record["notes"])
    assert "the state dict is the entry 'state_dict' of w.ckpt; epoch left out" in ran.err
    saved = torch.load(folder / "c.ckpt", weights_only=True)["state_dict"]
    assert_same({key.removeprefix("module."): value for key, value in saved.items()}, load(folder / "a.safetensors"))


def test_dry_run_writes_nothing(onebasin, folder):
    before = digest(folder)
    for command in (
        ["align", "a.safetensors", "b.pt", "-o", "c.pt", *MLP, "--report", "r.html"],
        ["merge", "a.safetensors", "b.pt", "-o", "c.safetensors", *MLP],
        ["apply", "p.safetensors", "b.pt", "-o", "c.pt"],
        ["barrier", "a.safetensors", "b.pt", *MLP, "--data", "digits"],
    ):
        ran = onebasin(*command, "--dry-run")
        assert ran.code == 0
        assert "would" in ran.out
        assert onebasin(*command, "--dry-run", "--json").record["dry_run"]
    assert digest(folder) == before


def test_apply_moves_and_moves_back(onebasin, folder):
    assert onebasin("apply", "p.safetensors", "a.safetensors", "-o", "m.safetensors").code == 0
    assert_same(load(folder / "m.safetensors"), load(folder / "b.pt"))
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "back.pt", "--inverse", "--json")
    assert ran.record["kind"] == "model"
    assert_same(load(folder / "back.pt"), load(folder / "a.safetensors"))


def test_merge(onebasin, folder):
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.safetensors", *MLP).code == 0
    for key, value in load(folder / "m.safetensors").items():
        torch.testing.assert_close(value, load(folder / "a.safetensors")[key])
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    ran = onebasin("merge", "a.safetensors", "c.pt", "-o", "w.pt", *MLP, "--weights", "1,3", "--json")
    assert ran.record["weights"] == [1, 3]
    model, inputs = make_with_inputs()
    expected = ob.merge(
        [load(folder / "a.safetensors"), load(folder / "c.pt")], weights=[0.25, 0.75], symmetry=ob.symmetry(model, inputs),
        order="anchored",
    )  # fmt: skip
    for key, value in load(folder / "w.pt").items():
        torch.testing.assert_close(value, expected[key])
    assert onebasin("merge", "a.safetensors", "b.pt", "c.pt", "-o", "three.pt", *MLP, "--to", "mean").code == 0


def test_reports_have_the_curves_where_there_is_data(onebasin, folder):
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    data = ("--data", "cli_networks:batches")
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP, *data, "--report", "align.html", "--json")
    paths = ran.record["paths"]
    assert list(paths) == ["as they are", "aligned"]
    assert paths["aligned"]["barrier"] == pytest.approx(0, abs=1e-5) != paths["as they are"]["barrier"]
    three = ("merge", "a.safetensors", "b.pt", "c.pt", *MLP, *data, "--to", "mean", "-o", "m.pt")
    record = onebasin(*three, "--report", "merge.html", "--json").record
    lines = ["a.safetensors to b.pt", "a.safetensors to c.pt"]
    assert list(record["paths"]) == [*lines, *(f"{line}, aligned" for line in lines)]
    assert record["paths"]["a.safetensors to b.pt, aligned"]["barrier"] == pytest.approx(0, abs=1e-5)
    evaluate = mean_loss(torch.nn.functional.cross_entropy, batches())
    merged = make_mlp()
    merged.load_state_dict(load(folder / "m.pt"))
    assert record["merged"] == pytest.approx(evaluate(merged))
    page = (folder / "merge.html").read_text()
    for text in ("Between the models", "matrices of b.pt", "matrices of c.pt", "Pinned, and why", "loss of the merge"):
        assert text in page
    assert onebasin(*three, "--force", "--json").record["paths"] == {}  # nothing is measured without a report


def test_data_that_does_not_fit_is_refused_before_anything_is_written(onebasin, folder):
    before = digest(folder)
    for data, words in (("odd_batches", "cannot be run on this data"), ("generator", "can be read once")):
        for command in ("align", "merge"):
            files = ("a.safetensors", "b.pt", "-o", "c.pt", "--report", "r.html")
            ran = onebasin(command, *files, *MLP, "--data", f"cli_networks:{data}")
            assert ran.code == 3
            assert words in ran.err
    assert digest(folder) == before


def test_the_first_batch_shows_what_inputs_look_like(onebasin, folder):
    plain = ("--model", "cli_networks:make_mlp")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain).code == 3
    data = ("--data", "digits")
    assert onebasin("align", "a.safetensors", "b.pt", "-o", "c.pt", *plain, *data).code == 0
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.pt", *plain, *data).code == 0
    assert onebasin("barrier", "a.safetensors", "c.pt", *plain, *data, "--points", "2").code == 0
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))


def test_models_of_one_name_are_told_apart(onebasin, folder):
    for name in ("x", "y"):
        (folder / name).mkdir()
        shutil.copy(folder / "b.pt", folder / name / "b.pt")
    ran = onebasin("merge", "a.safetensors", "x/b.pt", "y/b.pt", "-o", "m.pt", *MLP)
    assert "x/b.pt   2 groups" in ran.out
    assert "y/b.pt   2 groups" in ran.out


def test_names_of_files_are_not_markup(onebasin, folder):
    name = "[red]c:smile:" + "x" * 100 + ".pt"
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", name, *MLP, "--report", "r.html", "--dry-run")
    assert f"would write {name}, {name.removesuffix('.pt')}.permutation.safetensors and r.html; nothing" in ran.out


def test_merge_with_repair(onebasin, folder):
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        torch.save(make_conv()[0].state_dict(), folder / name)
    conv = ("--model", "cli_networks:make_conv")
    assert onebasin("merge", "x.pt", "y.pt", "-o", "plain.pt", *conv).code == 0
    ran = onebasin("merge", "x.pt", "y.pt", "-o", "repaired.pt", *conv, "--repair", "--data", "cli_networks:batches")
    assert ran.code == 0
    plain, repaired = load(folder / "plain.pt"), load(folder / "repaired.pt")
    assert plain.keys() == repaired.keys()
    assert not torch.equal(plain["1.running_var"], repaired["1.running_var"])


def test_barrier(onebasin, folder):
    curve = ("--points", "5", "--data", "cli_networks:batches")
    ran = onebasin(
        "barrier",
        "a.safetensors",
        "b.pt",
        *MLP,
        *curve,
        "--json",
        "--picture",
        "x.svg",
        "--permutation",
        "inverse.safetensors",
    )
    assert ran.code == 3  # there is no such permutation
    ob.Permutation.load(folder / "p.safetensors").inverse().save(folder / "inverse.safetensors")
    arguments = ("barrier", "a.safetensors", "b.pt", *MLP, *curve, "-p", "inverse.safetensors", "--report", "r.html")
    ran = onebasin(*arguments, "--json", "--picture", "x.svg")
    assert ran.code == 0
    paths = ran.record["paths"]
    assert paths["aligned"]["barrier"] == pytest.approx(0, abs=1e-5)
    assert len(paths["as they are"]["metrics"]["loss"]) == 5
    assert "accuracy" in paths["as they are"]["metrics"]
    assert (folder / "x.svg").read_text().startswith("<?xml")
    page = (folder / "r.html").read_text()
    assert "Permutation matrices of b.pt" in page
    assert "Pinned, and why" in page
    ran = onebasin(*arguments, "--force")
    assert "as they are" in ran.out
    assert "AUC" in ran.out


def test_verify_answers_by_its_exit_code(onebasin, folder):
    ran = onebasin("verify", "a.safetensors", "b.pt", *MLP)
    assert ran.code == 0
    assert "same function  yes" in ran.out
    state = load(folder / "b.pt")
    state["1.weight"][0, 0] += 1e-3
    torch.save(state, folder / "c.pt")
    ran = onebasin("verify", "a.safetensors", "c.pt", *MLP, "--json")
    assert ran.code == 1
    assert not ran.record["same"]
    assert 1e-9 < ran.record["difference"] < 1
    assert onebasin("verify", "a.safetensors", "c.pt", *MLP, "--tolerance", "1").code == 0


def test_inspect(onebasin, folder):
    ran = onebasin("inspect", "cli_networks:make_with_inputs")
    assert ran.code == 0
    assert "2 groups; 24 of 24 hidden units free (100.0%)" in ran.out
    assert "5.weight[0]" in ran.out
    assert "model output" in ran.out
    record = onebasin("inspect", "cli_networks:make_mlp", "--input-shape", "1,1,8,8", "--json").record
    assert record["groups"]["1.weight"] == {"size": 12, "parents": [], "axes": ["1.weight[0]", "1.bias[0]", "3.weight[1]"]}
    assert "of 24 units moved" in onebasin("inspect", "p.safetensors").out
    assert "group     size  moves" in onebasin("inspect", "cli_networks:make_with_inputs", "--all").out


def test_weight_norm_is_understood(onebasin, folder):
    torch.manual_seed(0)
    from cli_networks import make_normed

    model, inputs = make_normed()
    symmetry = ob.symmetry(model, inputs)
    torch.save(model.state_dict(), folder / "n.pt")
    torch.save(symmetry.random(torch.Generator().manual_seed(3)).apply(model), folder / "m.pt")
    arguments = ("--model", "cli_networks:make_normed")
    assert onebasin("align", "n.pt", "m.pt", "-o", "o.pt", *arguments).code == 0
    assert onebasin("verify", "m.pt", "o.pt", *arguments).code == 0
    if symmetry.groups:
        assert_same(load(folder / "o.pt"), load(folder / "n.pt"))


def test_hugging_face_folders(onebasin, folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    write_llama(folder / "a", seed=0)
    assert onebasin("align", "a", "a", "-o", "copy").code == 0
    identity = ob.Permutation.load(folder / "copy" / "permutation.safetensors")
    planted = identity.symmetry.random(torch.Generator().manual_seed(2))
    planted.save(folder / "q.safetensors")
    assert onebasin("apply", "q.safetensors", "a", "-o", "b").code == 0
    before = digest(folder / "b")
    assert {"config.json", "tokenizer_config.json", "model.safetensors.index.json"} <= before.keys()
    ran = onebasin("align", "a", "b", "-o", "c", "--report", "r.html", "--json")
    assert ran.code == 0
    assert ran.record["cost"] == 0.0
    assert_same(load(folder / "c"), load(folder / "a"))
    assert digest(folder / "b") == before
    assert onebasin("verify", "b", "c").code == 0
    index = json.loads((folder / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((folder / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert onebasin("merge", "a", "b", "-o", "m").code == 0
    assert {value.dtype for value in load(folder / "m").values()} == {torch.bfloat16}
    read = transformers.AutoModelForCausalLM.from_pretrained
    models = [read(folder / name, dtype=torch.float64) for name in ("a", "b", "m")]
    tokens = torch.arange(8).unsqueeze(0)
    first, second, merged = (model(tokens).logits for model in models)
    assert torch.equal(first, merged)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)  # its norms compute in float32


def test_half_precision_is_run_in_full(onebasin, folder):
    write_llama(folder / "a", seed=0)
    write_llama(folder / "b", seed=1)
    data = ("--data", "cli_networks:tokens", "--loss", "cli_networks:next_token", "--no-check")
    ran = onebasin("align", "a", "b", "-o", "c", *data, "--report", "r.html", "--json")
    assert ran.code == 0
    curves = {name: path["metrics"]["loss"] for name, path in ran.record["paths"].items()}
    assert curves["aligned"][-1] == pytest.approx(curves["as they are"][-1], rel=1e-5)  # bfloat16 would be off by 1e-2
    assert {value.dtype for value in load(folder / "c").values()} == {torch.bfloat16}


def test_shapes_that_differ_are_told(onebasin, folder):
    write_llama(folder / "a", seed=0)
    write_llama(folder / "b", seed=1, intermediate_size=32)
    ran = onebasin("align", "a", "b", "-o", "c")
    assert ran.code == 3
    assert "'model.layers.0.mlp.down_proj.weight' in b has shape (16, 32), the model has (16, 24)" in ran.err


def test_force_replaces_whole_folders_only_if_they_are_checkpoints(onebasin, folder):
    (folder / "a").mkdir()
    shutil.copy(folder / "a.safetensors", folder / "a" / "model.safetensors")
    command = ("apply", "p.safetensors", "a", "-o", "c")
    assert onebasin(*command).code == 0
    (folder / "c" / "pytorch_model.bin").write_bytes(b"stale")
    assert onebasin(*command).code == 3
    assert onebasin(*command, "--force").code == 0
    assert not (folder / "c" / "pytorch_model.bin").exists()
    (folder / "c" / "notes.odt").write_text("mine")
    ran = onebasin(*command, "--force")
    assert ran.code == 3
    assert "c holds notes.odt, which is not part of a checkpoint" in ran.err
    assert (folder / "c" / "notes.odt").read_text() == "mine"


def test_demo(onebasin, folder, monkeypatch):
    called = []
    monkeypatch.setattr("onebasin.cli.digits_demo.main", called.append)
    assert onebasin("demo", "--seed", "4").code == 0
    assert called == [["--out", "demo-output", "--seed", "4"]]


def test_methods_are_those_of_the_library():
    pytest.importorskip("typer")
    from onebasin.cli.options import MethodName
    from onebasin.matching import METHODS

    assert set(get_args(MethodName)) == METHODS.keys()


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_help_shows_the_way(onebasin, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    top = onebasin("--help").out
    for command in ("inspect", "align", "merge", "barrier", "apply", "verify", "demo"):
        assert command in top
        page = onebasin(command, "--help")
        assert page.code == 0
        assert "--help" in page.out
    assert "Exit codes" in top


def test_without_arguments_help_is_shown(onebasin):
    ran = onebasin()
    assert "Usage: onebasin" in ran.out + ran.err


def test_version(onebasin):
    assert onebasin("--version").out.startswith("onebasin")


def test_a_full_disk_is_told_before_any_work(onebasin, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "c.pt")
    assert ran.code == 3
    assert "0.00 GB are free there" in ran.err
    assert not (folder / "c.pt").exists()


def test_lora_and_optimizer_by_command(onebasin, folder):
    state = load(folder / "a.safetensors")
    lora = {"base_model.model.3.lora_A.weight": torch.randn(2, 12), "base_model.model.3.lora_B.weight": torch.randn(12, 2)}
    save_file(lora, folder / "lora.safetensors")
    assert onebasin("apply", "p.safetensors", "lora.safetensors", "-o", "l.safetensors", "--json").record["kind"] == "lora"
    moved = load_file(folder / "l.safetensors")
    whole = {**state, "3.weight": lora["base_model.model.3.lora_B.weight"] @ lora["base_model.model.3.lora_A.weight"]}
    expected = ob.Permutation.load(folder / "p.safetensors").apply(whole)["3.weight"]
    torch.testing.assert_close(
        moved["base_model.model.3.lora_B.weight"] @ moved["base_model.model.3.lora_A.weight"], expected
    )
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "o.pt")
    ran = onebasin("apply", "p.safetensors", "o.pt", "-o", "moved.pt", "--json")
    assert ran.record["kind"] == "optimizer"


@pytest.mark.parametrize("command", [(), ("align",), ("merge",)])
def test_without_arguments_there_is_help_and_a_sentence(onebasin, command):
    ran = onebasin(*command)
    assert ran.code == 2
    assert ran.err.strip().splitlines()[-1] == f"error: {' '.join(('onebasin', *command))} needs arguments"
