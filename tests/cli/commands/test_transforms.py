"""Tied heads, rotations and scales from folders to folders that transformers loads; the function stays."""

import pytest
import torch

import onebasin as ob
from onebasin.symmetries.verification import compare_models
from tests.cli.cli_files import digest, load
from tests.cli.tied_folders import load_pretrained, read_configuration, write_tied

X = {"input_ids": torch.arange(12)[None]}
FAST = ("--symmetry", "all", "--method", "weight-matching")
KINDS = ("LlamaForCausalLM", "GPT2LMHeadModel")


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "BertForMaskedLM"])
def test_canonical_unties_and_transformers_loads_it(onebasin, folder, kind, shards):
    model = write_tied(folder / "a", kind, shards=shards)
    ran = onebasin("canonical", "a", "-o", "c", "--untie", "--json")
    assert ran.code == 0, ran.err
    head = "cls.predictions.decoder.weight" if kind.startswith("Bert") else "lm_head.weight"
    assert ran.record["untied"][0] == head
    assert ran.record["configuration"] == {"tie_word_embeddings": False}
    assert read_configuration(folder / "c") == {**read_configuration(folder / "a"), "tie_word_embeddings": False}
    assert digest(folder / "c").keys() == digest(folder / "a").keys() | {"README.md"}
    assert head in load(folder / "c")
    assert f"{head.replace('_', chr(92) + '_')}" in (folder / "c" / "README.md").read_text()
    found = load_pretrained(folder / "c", kind)
    assert found.config.tie_word_embeddings is False
    assert compare_models(model, found, X) < 1e-9
    assert onebasin("verify", "a", "c").code == 0
    if not kind.startswith("Bert"):  # whose gains behind residual sums stay
        assert ran.record["left"] == {}
        stream = [b for b in ob.symmetry(found, {**X, "use_cache": False}, kinds="all").bases.values() if head in b.places]
        assert [basis.kind for basis in stream] == ["centred" if kind.startswith("GPT") else "orthogonal"]


@pytest.mark.parametrize("kind", KINDS)
def test_merge_and_align_untie_both_models(onebasin, folder, kind):
    models = [write_tied(folder / name, kind, seed) for seed, name in enumerate("ab")]
    ran = onebasin("merge", "a", "b", "-o", "m", *FAST, "--untie", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["untied"] == ["lm_head.weight"]
    assert any("lm_head.weight has a tensor of its own now" in note for note in ran.record["notes"])
    assert not any("stays" in note for note in ran.record["notes"])
    merged = load_pretrained(folder / "m", kind)
    assert not torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
    transform = ob.Transform.load(folder / "m.transforms" / "b.safetensors")
    assert {basis.kind for basis in transform.symmetry.bases.values()} & {"orthogonal", "centred"}
    ran = onebasin("align", "a", "b", "-o", "d", "--target-out", "c", *FAST, "--untie", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["untied"] == ["lm_head.weight"]
    for model, name in zip(models, "cd", strict=True):
        assert compare_models(model, load_pretrained(folder / name, kind), X) < 1e-9
    assert onebasin("verify", "b", "d").code == 0
    ran = onebasin("canonical", "b", "-o", "e", "--untie")
    assert ran.code == 0, ran.err
    ran = onebasin("apply", "d/transform.safetensors", "e", "-o", "f")
    assert ran.code == 0, ran.err
    assert compare_models(models[1], load_pretrained(folder / "f", kind), X) < 1e-9
    assert onebasin("apply", "d/transform.safetensors", "b", "-o", "g").code == 3  # it is tied


def test_without_it_a_note_says_what_to_give(onebasin, folder):
    for seed, name in enumerate("ab"):
        write_tied(folder / name, "LlamaForCausalLM", seed)
    offer = "give --untie (untie=True in Python), which needs tie_word_embeddings: false"
    for arguments in (("merge", "a", "b", "-o", "m", *FAST), ("align", "a", "b", "-o", "d", *FAST)):
        ran = onebasin(*arguments, "--json")
        assert ran.code == 0, ran.err
        assert any(offer in note and "model.norm.weight" in note for note in ran.record["notes"])
        assert ran.record["untied"] == []
    ran = onebasin("canonical", "a", "-o", "c", "--json")
    assert offer in ran.record["left"]["model.norm.weight"]
    assert read_configuration(folder / "c") == read_configuration(folder / "a")


def test_aligned_folders_for_mergekit_are_untied(onebasin, folder, monkeypatch):
    monkeypatch.setattr("onebasin.cli.mergekit.find_program", lambda: None)
    models = [write_tied(folder / name, "LlamaForCausalLM", seed) for seed, name in enumerate("ab")]
    ran = onebasin("merge", "a", "b", "-o", "m", *FAST, "--untie", "--then", "linear")
    assert ran.code == 0, ran.err
    for number, model in enumerate(models, start=1):
        assert compare_models(model, load_pretrained(folder / f"m-aligned-{number}", "LlamaForCausalLM"), X) < 1e-9


def test_the_loss_of_an_untied_merge_is_that_of_the_merge(onebasin, folder):
    for seed, name in enumerate("ab"):
        write_tied(folder / name, "LlamaForCausalLM", seed)
    (folder / "texts.py").write_text(
        "import torch\n"
        "def batches():\n    ids = torch.arange(24).view(2, 12)\n    return [({'input_ids': ids}, ids)]\n"
        "def loss(output, ids):\n    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())\n"
    )
    given = ("--data", "texts:batches", "--loss", "texts:loss", "--report", "m.html", "--json")
    ran = onebasin("merge", "a", "b", "-o", "m", *FAST, "--untie", *given)
    assert ran.code == 0, ran.err
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = load_pretrained(folder / "m", "LlamaForCausalLM")(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    assert ran.record["merged"]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_nothing_is_untied_without_need_or_by_other_kinds(onebasin, folder):
    model = write_tied(folder / "a", "LlamaForCausalLM")
    for key, parameter in model.named_parameters():
        if "norm" in key:
            torch.nn.init.ones_(parameter)
    model.save_pretrained(folder / "b")
    ran = onebasin("canonical", "b", "-o", "c", "--untie")
    assert ran.code == 0, ran.err
    assert "nothing: that would free no gain" in ran.out
    assert read_configuration(folder / "c")["tie_word_embeddings"] is True
    for command in ("align", "merge"):
        ran = onebasin(command, "a", "b", "-o", "d", "--untie", "--symmetry", "positive")
        assert ran.code == 2
        assert "gains are folded with --symmetry all alone" in " ".join(ran.err.replace("│", " ").split())


def test_a_file_without_a_configuration_is_to_be_loaded_into_an_untied_module(onebasin, folder):
    model = write_tied(folder / "a", "LlamaForCausalLM")
    torch.save(model.state_dict(), folder / "a.pt")
    ran = onebasin("canonical", "a.pt", "-o", "c.pt", "--model", "a", "--untie")
    assert ran.code == 0, ran.err
    assert "lm_head.weight (load it into an untied module)" in " ".join(ran.out.split())
    found = load(folder / "c.pt")
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize("reference", ["first", "mean"])
def test_scales_and_bases_are_named_in_all_outputs(onebasin, folder, reference):
    """On the console, in JSON and in the report; also if each model is aligned to the mean of the others."""
    pytest.importorskip("matplotlib")
    for seed, name in enumerate("abc"):
        write_tied(folder / name, "LlamaForCausalLM", seed, tie_word_embeddings=False)
    command = ("merge", "a", "b", "c", "-o", "m", *FAST, "--reference", reference, "--report", "m.html")
    ran = onebasin(*command, "--json")
    assert ran.code == 0, ran.err
    assert set(ran.record["changes"]) == ({"b", "c"} if reference == "first" else {"a", "b", "c"})
    bases, scales = (ran.record["changes"]["b"][what] for what in ("bases", "scales"))
    assert {each["kind"] for each in bases} == {"orthogonal", "linear", "rotary", "signed"}
    assert all(each["distance"] > 0 and each["condition"] >= 1 and each["num_members"] >= 1 for each in bases)
    assert all(0 < each["lowest"] <= each["highest"] for each in scales)
    page = (folder / "m.html").read_text()
    assert "Changes of basis of b" in page
    assert "Positive scales of c" in page
    ran = onebasin(*command, "--force")
    assert ran.code == 0, ran.err
    assert "changes of basis: 4 (" in " ".join(ran.out.split())
    assert "1 orthogonal" in " ".join(ran.out.split())
    load_pretrained(folder / "m", "LlamaForCausalLM")


def test_an_alignment_names_its_scales_and_bases(onebasin, folder):
    pytest.importorskip("matplotlib")
    for seed, name in enumerate("ab"):
        write_tied(folder / name, "LlamaForCausalLM", seed, tie_word_embeddings=False)
    ran = onebasin("align", "a", "b", "-o", "d", *FAST, "--report", "d.html", "--json")
    assert ran.code == 0, ran.err
    transform = ob.Transform.load(folder / "d" / "transform.safetensors")
    assert [each["name"] for each in ran.record["bases"]] == list(transform.symmetry.bases)
    assert [each["name"] for each in ran.record["scales"]] == list(transform.symmetry.scales)
    assert "<h2>Changes of basis</h2>" in (folder / "d.html").read_text()
    assert onebasin("align", "a", "b", "-o", "e", "--method", "weight-matching", "--json").record["bases"] == []


def test_a_transform_of_untied_models_names_what_unties(onebasin, folder):
    for seed, name in enumerate("ab"):
        write_tied(folder / name, "LlamaForCausalLM", seed)
    assert onebasin("align", "a", "b", "-o", "d", *FAST, "--untie").code == 0
    ran = onebasin("apply", "d/transform.safetensors", "b", "-o", "g")
    assert ran.code == 3
    said = " ".join(ran.err.split())
    assert "tie_word_embeddings" in said
    assert "onebasin canonical --untie folds the gains of the tied model" in said


def test_notes_of_a_merge_name_all_models_that_they_are_about(onebasin, folder):
    for seed, name in enumerate("abc"):
        write_tied(folder / name, "LlamaForCausalLM", seed)
    ran = onebasin("merge", "a", "b", "c", "-o", "m", *FAST, "--json")
    assert ran.code == 0, ran.err
    (folded,) = [note for note in ran.record["notes"] if "gains of norms were folded" in note]
    assert folded.startswith("a, b, c: ")
    (chosen,) = [note for note in ran.record["notes"] if "Changes of basis" in note or "changes of basis" in note][:1]
    assert chosen.startswith(("b", "c"))


@pytest.fixture
def large(monkeypatch):
    """Every model counts as one that is too large to be loaded."""
    monkeypatch.setattr("onebasin.cli.inputs._LEARNED_UP_TO", 0)
    monkeypatch.setattr("onebasin.checkpoints.CheckpointSet.load", None)


@pytest.mark.parametrize("kind", KINDS)
def test_large_models_are_not_loaded_and_compute_the_same(onebasin, folder, large, kind):
    untie = ("--untie",) if kind == "GPT2LMHeadModel" else ()
    models = [write_tied(folder / name, kind, seed) for seed, name in enumerate("ab")]
    ran = onebasin("align", "a", "b", "-o", "d", "--target-out", "c", *FAST, *untie, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["untied"] == ["lm_head.weight"] * len(untie)
    assert ran.record["cost"] < ran.record["start_cost"]
    for model, name in zip(models, "cd", strict=True):
        assert compare_models(model, load_pretrained(folder / name, kind), X) < 1e-9
    ran = onebasin("merge", "a", "b", "-o", "m", *FAST, *untie, "--json")
    assert ran.code == 0, ran.err
    found, inputs = load_pretrained(folder / "m", kind), {**X, "use_cache": False}
    expected = ob.merge(
        models, inputs, kinds="all", untie=bool(untie), method="weight-matching", scaling=ob.Scaling(steps=0)
    )  # fmt: skip
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], value, rtol=1e-10, atol=1e-11)
