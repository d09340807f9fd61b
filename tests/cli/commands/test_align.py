import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import onebasin as ob
from tests.cli.cli_files import MLP, assert_same, digest, load, write_llama
from tests.cli.cli_networks import batches, make_mlp, make_normed, make_transformer

ALIGN = ("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP)


@pytest.mark.parametrize("method", ["auto", "weight-matching", "sinkhorn", "ste"])
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


@pytest.mark.parametrize(
    ("objective", "unit"),
    [
        ((), "squared distance of the weights"),
        (("--objective", "weight-distance"), "squared distance of the weights"),
        (("--objective", "midpoint"), "loss at the midpoint between the networks"),
        (("--objective", "random-point"), "mean loss at points between the networks"),
    ],
)
def test_the_cost_has_a_unit(onebasin, folder, objective, unit):
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    data = ("--data", "cli_networks:batches") if "-point" in str(objective) or "midpoint" in objective else ()
    command = (
        "align",
        "a.safetensors",
        "c.pt",
        "-o",
        "d.pt",
        *MLP,
        *objective,
        *data,
        "--method",
        "ste",
        "--set",
        "steps=1",
    )
    assert f"({unit})" in onebasin(*command).out
    record = onebasin(*command, "--force", "--json").record
    assert record["cost_is"] == unit
    if not data:
        a, d = load(folder / "a.safetensors"), load(folder / "d.pt")
        assert record["cost"] == pytest.approx(sum(float((a[key] - d[key]).square().sum()) for key in a))


def test_align_speaks_json_and_nothing_else(onebasin, folder):
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "c.safetensors", "-p", "q.safetensors", *MLP, "--json")
    assert ran.record["cost"] == 0.0
    assert ran.record["start_cost"] > 0
    assert ran.record["converged"]
    assert (ran.record["target"], ran.record["model"]) == ("a.safetensors", "b.pt")
    assert ran.record["permutation"] == "q.safetensors"
    assert_same(load_file(folder / "c.safetensors"), load(folder / "a.safetensors"))
    assert len(ran.out.splitlines()) == 1


OTHER = ("align", "a.safetensors", "c.pt", "-o", "out.pt", "--force", "--json", *MLP)


@pytest.fixture
def other(folder):
    """c.pt, a network that is not a copy of a.safetensors."""
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")


def align_as_the_library(folder, **arguments):
    a, c = make_mlp(), make_mlp()
    a.load_state_dict(load(folder / "a.safetensors"))
    c.load_state_dict(load(folder / "c.pt"))
    return ob.align(c, to=a, example_inputs=torch.zeros(1, 1, 8, 8), **arguments)


@pytest.mark.usefixtures("other")
def test_the_defaults_are_those_of_the_library(onebasin, folder):
    ran = onebasin(*OTHER, "--report", "r.html")
    expected = align_as_the_library(folder)
    assert ran.record["method"] == expected.method == "sinkhorn"
    assert ran.record["cost"] == pytest.approx(expected.cost)
    assert_same(load(folder / "out.pt"), expected.model.state_dict())
    for note in expected.notes:
        assert note in ran.record["notes"]
        assert note in ran.err
        assert note in (folder / "r.html").read_text()


@pytest.mark.usefixtures("other")
def test_data_decides_what_auto_chooses(onebasin, folder):
    ran = onebasin(*OTHER, "--data", "cli_networks:batches")
    expected = align_as_the_library(folder, data=batches())
    assert ran.record["method"] == expected.method == "activation-matching"
    assert_same(load(folder / "out.pt"), expected.model.state_dict())
    ran = onebasin(*OTHER, "--data", "digits", "--method", "weight-matching")  # which does not look at it
    assert ran.record["method"] == "weight-matching"
    assert_same(load(folder / "out.pt"), align_as_the_library(folder, method="weight-matching").model.state_dict())


@pytest.mark.usefixtures("other")
def test_options_reach_the_library(onebasin, folder):
    ran = onebasin(*OTHER, "--set", "steps=3", "--no-polish")
    assert ran.record["method"] == "sinkhorn"
    assert [entry["by"] for entry in ran.record["history"]] == ["sinkhorn"] * 3
    assert ran.record["cost"] == pytest.approx(align_as_the_library(folder, steps=3, polish=False).cost)
    ran = onebasin(*ALIGN, "--json", "--no-detect-copy", "--method", "weight-matching")
    assert {entry["by"] for entry in ran.record["history"]} == {"weight-matching"}


def test_prefixes_are_reported_and_kept(onebasin, folder):
    wrapped = {f"module.{key}": value for key, value in load(folder / "b.pt").items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, folder / "w.ckpt")
    ran = onebasin("align", "a.safetensors", "w.ckpt", "-o", "c.ckpt", *MLP, "--json")
    assert ran.code == 0
    assert any("begin with 'module.'" in note for note in ran.record["notes"])
    assert "the state dict is the entry 'state_dict' of w.ckpt\n" in ran.err
    saved = torch.load(folder / "c.ckpt", weights_only=True)["state_dict"]
    assert_same({key.removeprefix("module."): value for key, value in saved.items()}, load(folder / "a.safetensors"))


def test_names_of_files_are_not_markup(onebasin, folder):
    name = "[red]c:smile:" + "x" * 100 + ".pt"
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", name, *MLP, "--report", "r.html", "--dry-run")
    assert f"would write {name}, {name.removesuffix('.pt')}.permutation.safetensors and r.html; nothing" in ran.out


def test_weight_norm_is_understood(onebasin, folder):
    torch.manual_seed(0)
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


@pytest.fixture
def transformers_on_disk(folder):
    """x.pt and y.pt, transformers whose gains are not one."""
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        model, _ = make_transformer()
        for key, parameter in model.named_parameters():
            if "norm" in key or key == "2.weight":
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        torch.save(model.state_dict(), folder / name)
    return [make_transformer() for _ in range(2)]


TRANSFORMER = ("--model", "cli_networks:make_transformer")


@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_more_than_permutations(onebasin, folder, transformers_on_disk, kinds):
    written = ("--target-out", "t.pt") if kinds == "all" else ()
    ran = onebasin("align", "x.pt", "y.pt", "-o", "z.pt", *TRANSFORMER, "--symmetry", kinds, *written, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["kinds"] == kinds
    assert ran.record["permutation"] == "z.transform.safetensors"
    assert "positive scale" in ran.record["symmetry"]
    for (network, _), name in zip(transformers_on_disk, ("x.pt", "y.pt"), strict=True):
        network.load_state_dict(load(folder / name))
    (a, inputs), (b, _) = transformers_on_disk
    expected = ob.align(b, to=a, example_inputs=inputs, kinds=kinds)
    assert ran.record["cost"] == pytest.approx(expected.cost)
    for key, value in load(folder / "z.pt").items():
        torch.testing.assert_close(value, expected.model.state_dict()[key])
    assert onebasin("verify", "y.pt", "z.pt", *TRANSFORMER, "--tolerance", "1e-5").code == 0
    source = "y.pt"
    if kinds == "all":
        for key, value in load(folder / "t.pt").items():
            torch.testing.assert_close(value, expected.target.state_dict()[key])
        assert onebasin("verify", "x.pt", "t.pt", *TRANSFORMER, "--tolerance", "1e-5").code == 0
        assert "canonical form of x.pt" not in ran.err
        assert onebasin("canonical", "y.pt", "-o", "yc.pt", *TRANSFORMER).code == 0
        source = "yc.pt"
    assert onebasin("apply", "z.transform.safetensors", source, "-o", "again.pt").code == 0
    for key, value in load(folder / "again.pt").items():
        torch.testing.assert_close(value, load(folder / "z.pt")[key])
    assert "changes of basis" in onebasin("inspect", "z.transform.safetensors").out or kinds == "positive"


@pytest.mark.usefixtures("transformers_on_disk")
def test_a_saved_transform_is_a_start(onebasin, folder):
    command = ("align", "x.pt", "y.pt", *TRANSFORMER, "--symmetry", "all", "--json")
    first = onebasin(*command, "-o", "z.pt")
    start = ("--init", "z.transform.safetensors")
    again = onebasin(*command, "-o", "w.pt", *start, "--method", "ste", "--set", "steps=0")
    assert again.code == 0, again.err
    assert again.record["cost"] <= first.record["cost"] * (1 + 1e-6)
    ran = onebasin("align", "x.pt", "y.pt", "-o", "v.pt", *TRANSFORMER, *start)
    assert ran.code == 3
    assert "the transform given as init belongs to another symmetry" in ran.err
    assert not (folder / "v.pt").exists()
    merged = onebasin("merge", "x.pt", "y.pt", "-o", "m.pt", *TRANSFORMER, "--symmetry", "all", *start, "--json")
    assert merged.code == 0, merged.err


@pytest.mark.usefixtures("transformers_on_disk")
def test_the_other_end_is_named_if_it_is_not_written(onebasin, folder):
    ran = onebasin("align", "x.pt", "y.pt", "-o", "z.pt", *TRANSFORMER, "--symmetry", "all", "--report", "r.html", "--json")
    assert ran.code == 0
    note = "z.pt is aligned to the canonical form of x.pt"
    assert note in ran.err
    assert any(entry.startswith(note) and "onebasin canonical x.pt" in entry for entry in ran.record["notes"])


@pytest.mark.usefixtures("transformers_on_disk")
def test_the_line_of_a_report_begins_at_the_canonical_form(onebasin, folder):
    command = ("align", "x.pt", "y.pt", "-o", "z.pt", *TRANSFORMER, "--symmetry", "all", "--set", "max_sweeps=1")
    data = ("--data", "cli_networks:sequences", "--loss", "cli_networks:at_every_position", "--method", "weight-matching")
    ran = onebasin(*command, *data, "--report", "r.html", "--json")
    assert ran.code == 0, ran.err
    plain, aligned = (ran.record["paths"][name]["metrics"]["loss"] for name in ("as they are", "aligned"))
    assert aligned[0] == pytest.approx(plain[0], rel=1e-4)
    assert aligned[-1] == pytest.approx(plain[-1], rel=1e-4)
    assert aligned[5] != pytest.approx(plain[5], rel=1e-4)


@pytest.mark.usefixtures("transformers_on_disk")
def test_a_second_output_needs_a_place_of_its_own(onebasin, folder):
    (folder / "taken.pt").write_bytes(b"mine")
    before = digest(folder)
    command = ("align", "x.pt", "y.pt", "-o", "z.pt", *TRANSFORMER, "--symmetry", "all", "--target-out")
    for place, message in (
        ("z.pt", "z.pt is in the way of another output"),
        ("z.transform.safetensors", "is in the way of another output"),
        ("y.pt", "inputs are never changed"),
        ("taken.pt", "taken.pt exists already"),
    ):
        ran = onebasin(*command, place)
        assert ran.code == 3
        assert message in ran.err
    ran = onebasin("align", "x.pt", "y.pt", "-o", "z.pt", *TRANSFORMER, "--target-out", "t.pt")
    assert ran.code == 2
    assert "TARGET stays as it is with --symmetry permutation" in ran.err
    ran = onebasin(*command, "t.pt", "--dry-run")
    assert "would write z.pt, z.transform.safetensors and t.pt; nothing was written" in ran.out
    assert digest(folder) == before


def test_hugging_face_folders_in_another_basis(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    write_llama(folder / "a", seed=0, tie_word_embeddings=False)
    assert onebasin("align", "a", "a", "-o", "copy", "--symmetry", "all", "--target-out", "c").code == 0
    symmetry = ob.Transform.load(folder / "copy" / "transform.safetensors").symmetry
    ob.Transform.random(symmetry, torch.Generator().manual_seed(0)).save(folder / "q.safetensors")
    assert onebasin("apply", "q.safetensors", "c", "-o", "b").code == 0  # shard by shard
    assert digest(folder / "b").keys() == {*digest(folder / "a"), "README.md"}
    read = transformers.AutoModelForCausalLM.from_pretrained
    models = [read(folder / name, dtype=torch.float64).requires_grad_(False) for name in ("c", "b")]
    first, second = (model(torch.arange(8).unsqueeze(0)).logits for model in models)
    assert (first - second).abs().max() < 0.05 * first.abs().max()  # they are rounded to bfloat16
    ran = onebasin("apply", "q.safetensors", "a", "-o", "d")
    assert ran.code == 3
    assert "must be filled with 1 for a change of basis" in ran.err
    assert "onebasin canonical" in ran.err
    assert not (folder / "d").exists()


def write_training(folder: Path) -> None:
    """run.pt: b.pt with a moving average and the state of an optimiser."""
    model = make_mlp()
    model.load_state_dict(load(folder / "b.pt"))
    optimizer = torch.optim.Adam(model.named_parameters())
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    saved = {"epoch": 3, "model": load(folder / "b.pt"), "optimizer": optimizer.state_dict(), "ema": model.state_dict()}
    torch.save(saved, folder / "run.pt")


def test_training_checkpoints_are_moved_whole(onebasin, folder):
    write_training(folder)
    ran = onebasin("align", "a.safetensors", "run.pt", "-o", "c.pt", *MLP, "--json")
    assert ran.code == 0
    assert "run.pt: moved with the model: optimizer, ema" in ran.record["notes"]
    permutation = ob.Permutation.load(folder / "c.permutation.safetensors")
    before, after = (torch.load(folder / name, weights_only=True) for name in ("run.pt", "c.pt"))
    assert after["epoch"] == 3
    assert_same(after["model"], load(folder / "a.safetensors"))
    assert_same(after["ema"], permutation.apply(before["ema"]))
    names = before["optimizer"]["param_groups"][0]["param_names"]
    for number, name in enumerate(names):
        expected = permutation.move(before["optimizer"]["state"][number]["exp_avg"], permutation.symmetry.layouts[name])
        assert torch.equal(after["optimizer"]["state"][number]["exp_avg"], expected)
    assert onebasin("apply", "c.permutation.safetensors", "run.pt", "-o", "d.pt").code == 0
    assert_same(torch.load(folder / "d.pt", weights_only=True)["ema"], after["ema"])


def test_the_model_of_a_training_checkpoint_is_written_alone(onebasin, folder):
    write_training(folder)
    before = digest(folder)
    for arguments, message in (
        (
            ("-o", "c.safetensors"),
            "c.safetensors can hold tensors alone, but there are other entries beside",
        ),
        (
            ("-o", "c.pt", "--symmetry", "positive"),
            "run.pt holds optimizer, ema beside the model, which align moves by permutations alone",
        ),
    ):
        ran = onebasin("align", "a.safetensors", "run.pt", *MLP, *arguments)
        assert ran.code == 3
        assert message in ran.err
        assert digest(folder) == before
        ran = onebasin("align", "a.safetensors", "run.pt", *MLP, *arguments, "--model-only")
        assert ran.code == 0, ran.err
        assert "left out, as only the model is written: epoch, optimizer, ema" in ran.err
        for file in digest(folder).keys() - before.keys():
            (folder / file).unlink()
    ran = onebasin("merge", "run.pt", "a.safetensors", "-o", "c.pt", *MLP)
    assert "run.pt: left out, as only the model is written: epoch, optimizer, ema" in ran.err
    assert torch.load(folder / "c.pt", weights_only=True).keys() == {"model"}
    ran = onebasin("canonical", "run.pt", "-o", "d.pt", *MLP)
    assert "run.pt: left out, as only the model is written: epoch, optimizer, ema" in ran.err
    ran = onebasin("apply", "p.safetensors", "run.pt", "-o", "e.safetensors", "--model-only")
    assert_same(load(folder / "e.safetensors"), ob.Permutation.load(folder / "p.safetensors").apply(load(folder / "b.pt")))
