import shutil

import pytest
import torch

import onebasin as ob
from onebasin.landscape.evaluation import mean_loss
from tests.cli.cli_files import MLP, load
from tests.cli.cli_networks import batches, make_conv, make_mlp, make_transformer, make_with_inputs


def test_merge(onebasin, folder):
    assert onebasin("merge", "a.safetensors", "b.pt", "-o", "m.safetensors", *MLP).code == 0
    for key, value in load(folder / "m.safetensors").items():
        torch.testing.assert_close(value, load(folder / "a.safetensors")[key])
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    ran = onebasin("merge", "a.safetensors", "c.pt", "-o", "w.pt", *MLP, "--weights", "1,3", "--json")
    assert ran.record["weights"] == [0.25, 0.75]
    assert ran.record["method"] == "sinkhorn"
    assert "c.pt: sinkhorn was chosen: without data" in ran.err
    assert any(note.startswith("c.pt: sinkhorn was chosen") for note in ran.record["notes"])
    model, inputs = make_with_inputs()
    states = [load(folder / "a.safetensors"), load(folder / "c.pt")]
    expected = ob.merge(states, weights=[0.25, 0.75], symmetry=ob.symmetry(model, inputs))
    for key, value in load(folder / "w.pt").items():
        torch.testing.assert_close(value, expected[key])
    ran = onebasin("merge", "a.safetensors", "b.pt", "c.pt", "-o", "three.pt", *MLP, "--reference", "mean", "--json")
    assert ran.code == 0
    assert ran.record["reference"] == "mean"
    assert "b.pt: The model is a permuted copy of the target: no method was run." in ran.record["notes"]


def test_a_negative_variance_is_refused_and_nothing_is_written(onebasin, folder):
    conv = ("--model", "cli_networks:make_conv")
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        model = make_conv()[0]
        model[1].running_var *= seed + 1
        torch.save(model.state_dict(), folder / name)
    ran = onebasin("merge", "x.pt", "y.pt", "-o", "m.pt", *conv, "--weights", "2,-1.5")
    assert ran.code == 3
    assert "the variance '1.running_var' of a batch norm would be negative" in " ".join(ran.err.split())
    assert not (folder / "m.pt").exists()
    assert onebasin("merge", "x.pt", "y.pt", "-o", "m.pt", *conv, "--weights=-0.5,1.5").code == 0
    assert bool((load(folder / "m.pt")["1.running_var"] > 0).all())


def test_each_model_has_its_start(onebasin, folder):
    for seed, name in ((5, "c.pt"), (6, "d.pt")):
        torch.manual_seed(seed)
        torch.save(make_mlp().state_dict(), folder / name)
    symmetry = ob.Permutation.load(folder / "p.safetensors").symmetry
    starts = [symmetry.random(torch.Generator().manual_seed(seed)) for seed in range(2)]
    for start, name in zip(starts, ("s.safetensors", "t.safetensors"), strict=True):
        start.save(folder / name)
    merge = ("merge", "a.safetensors", "c.pt", "d.pt", "-o", "m.pt", *MLP, "--method", "ste", "--set", "steps=0")
    assert onebasin(*merge, "--init", "s.safetensors", "--init", "t.safetensors").code == 0
    found = [ob.Permutation.load(folder / "m.permutations" / f"{name}.safetensors") for name in "acd"]
    assert found[0].is_identity
    states = [load(folder / name) for name in ("a.safetensors", "c.pt", "d.pt")]
    moved = []
    ob.merge(states, symmetry=symmetry, method="ste", steps=0, init=starts, on_aligned=moved.extend)
    assert found == moved
    for count in (3, 4):
        ran = onebasin(*merge, "--force", *["--init", "s.safetensors"] * count)
        assert ran.code == 2
        assert f"there are {count} starts: give one for all models, or 2: one for each but a.safetensors" in ran.err
    before = (folder / "s.safetensors").read_bytes()
    ran = onebasin(*merge, "--force", "--init", "s.safetensors", "--report", "s.safetensors")
    assert "inputs are never changed" in ran.err
    assert (folder / "s.safetensors").read_bytes() == before


def test_models_of_one_name_are_told_apart(onebasin, folder):
    for name in ("x", "y"):
        (folder / name).mkdir()
        shutil.copy(folder / "b.pt", folder / name / "b.pt")
    ran = onebasin("merge", "a.safetensors", "x/b.pt", "y/b.pt", "-o", "m.pt", *MLP)
    assert "x/b.pt   2 groups" in ran.out
    assert "y/b.pt   2 groups" in ran.out


def test_merge_with_repair(onebasin, folder):
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        torch.save(make_conv()[0].state_dict(), folder / name)
    conv = ("--model", "cli_networks:make_conv", "--method", "weight-matching")
    assert onebasin("merge", "x.pt", "y.pt", "-o", "plain.pt", *conv).code == 0
    ran = onebasin(
        "merge", "x.pt", "y.pt", "-o", "repaired.pt", *conv, "--repair", "repair", "--data", "cli_networks:batches"
    )
    assert ran.code == 0
    plain, repaired = load(folder / "plain.pt"), load(folder / "repaired.pt")
    assert plain.keys() == repaired.keys()
    assert not torch.equal(plain["1.running_var"], repaired["1.running_var"])
    data = ("--method", "auto", "--data", "cli_networks:batches")
    for name, options, expected in (("auto.pt", (), "repair"), ("none.pt", ("--repair", "none"), None)):
        ran = onebasin("merge", "x.pt", "y.pt", "-o", name, *conv, *data, *options, "--report", f"{name}.html", "--json")
        assert ran.record["repair"] == expected
        assert any("were corrected on the data" in note for note in ran.record["notes"]) == (expected is not None)
    auto, none = load(folder / "auto.pt"), load(folder / "none.pt")
    assert torch.equal(auto["0.weight"], none["0.weight"])
    assert not torch.equal(auto["1.running_var"], none["1.running_var"])


def test_lines_of_reports_are_repaired_as_the_merge_is(onebasin, folder):
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        torch.save(make_conv()[0].state_dict(), folder / name)
    conv = ("--model", "cli_networks:make_conv", "--data", "cli_networks:batches", "--json", "--force")
    aligned = ("align", "x.pt", "y.pt", "-o", "z.pt", *conv, "--report", "r.html")
    merged = ("merge", "x.pt", "y.pt", "-o", "m.pt", *conv, "--report", "r.html")
    ran = [
        onebasin(*aligned, "--repair", "repair"),
        onebasin(*merged),
        onebasin(*aligned),
        onebasin(*merged, "--repair", "none"),
    ]
    losses = [next(iter(each.record["paths"].values()))["metrics"]["loss"] for each in ran]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[2] == pytest.approx(losses[3])
    assert losses[0][5] != pytest.approx(losses[2][5])
    ran = onebasin("align", "x.pt", "y.pt", "-o", "w.pt", *conv, "--repair", "repair")
    assert ran.code == 2
    assert "lines are in the report" in ran.err


def test_reports_have_the_curves_where_there_is_data(onebasin, folder):
    torch.manual_seed(5)
    torch.save(make_mlp().state_dict(), folder / "c.pt")
    data = ("--data", "cli_networks:batches")
    ran = onebasin("align", "a.safetensors", "b.pt", "-o", "d.pt", *MLP, *data, "--report", "align.html", "--json")
    paths = ran.record["paths"]
    assert list(paths) == ["as they are", "aligned"]
    assert paths["aligned"]["barrier"] == pytest.approx(0, abs=1e-5) != paths["as they are"]["barrier"]
    three = ("merge", "a.safetensors", "b.pt", "c.pt", *MLP, *data, "--reference", "mean", "-o", "m.pt")
    record = onebasin(*three, "--repair", "none", "--report", "merge.html", "--json").record
    lines = ["a.safetensors to b.pt", "a.safetensors to c.pt"]
    assert list(record["paths"]) == [*lines, *(f"{line}, aligned" for line in lines)]
    assert record["paths"]["a.safetensors to b.pt, aligned"]["barrier"] == pytest.approx(0, abs=1e-5)
    evaluate = mean_loss(torch.nn.functional.cross_entropy, batches())
    merged = make_mlp()
    merged.load_state_dict(load(folder / "m.pt"))
    assert record["merged"] == pytest.approx(evaluate(merged))
    page = (folder / "merge.html").read_text()
    assert "activation-matching was chosen: there is data" in page
    for text in ("Between the models", "matrices of b.pt", "matrices of c.pt", "Pinned, and why", "loss of the merge"):
        assert text in page
    assert onebasin(*three, "--force", "--json").record["paths"] == {}  # nothing is measured without a report


@pytest.mark.parametrize("kinds", ["positive", "all"])
def test_merge_with_more_than_permutations(onebasin, folder, kinds):
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        torch.save(make_transformer()[0].state_dict(), folder / name)
    model = ("--model", "cli_networks:make_transformer")
    ran = onebasin("merge", "x.pt", "y.pt", "-o", "m.pt", *model, "--symmetry", kinds, "--json", "--report", "r.html")
    assert ran.code == 0, ran.err
    assert ran.record["kinds"] == kinds
    assert "Distance by layer" in (folder / "r.html").read_text()
    networks = [make_transformer() for _ in range(2)]
    for (network, _), name in zip(networks, ("x.pt", "y.pt"), strict=True):
        network.load_state_dict(load(folder / name))
    expected = ob.merge([network for network, _ in networks], networks[0][1], kinds=kinds)
    for key, value in load(folder / "m.pt").items():
        torch.testing.assert_close(value, expected.state_dict()[key])
