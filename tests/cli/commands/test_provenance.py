import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.cli_files import digest, load, write_llama

MLP = ("--model", "cli_networks:make_mlp", "--input-shape", "1,1,8,8")


@pytest.fixture
def changed(folder):
    """f.pt, trained further from a.safetensors; b.pt is a permuted copy of a."""
    torch.manual_seed(0)
    state = {key: value + 0.01 * torch.randn_like(value) for key, value in load_file(folder / "a.safetensors").items()}
    torch.save(state, folder / "f.pt")


def test_a_permuted_copy_is_the_same(onebasin, folder):
    before = digest(folder)
    ran = onebasin("provenance", "a.safetensors", "b.pt", *MLP, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["relation"] == "same"
    assert max(ran.record["changes"].values()) == 0
    assert digest(folder) == before


def test_a_fine_tune_is_derived_and_the_report_has_the_evidence(onebasin, folder, changed):
    ran = onebasin("provenance", "a.safetensors", "f.pt", *MLP, "--level", "1e-4", "--report", "r.html", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["relation"] == "derived"
    assert ran.record["p_value"] <= 1e-4
    assert {each["test"] for each in ran.record["evidence"]} >= {"order"}
    page = (folder / "r.html").read_text()
    assert "Evidence by group" in page
    assert "Derived: p = " in page
    ran = onebasin("provenance", "a.safetensors", "f.pt", *MLP, "--report", "r.html")
    assert ran.code == 3
    assert "--force" in ran.err


def test_a_rescaled_copy_is_found_with_the_other_kinds(onebasin, folder):
    state = load(folder / "b.pt")
    scaled = {"1.weight": 2 * state["1.weight"], "1.bias": 2 * state["1.bias"], "3.weight": state["3.weight"] / 2}
    torch.save({**state, **scaled}, folder / "s.pt")
    ran = onebasin("provenance", "a.safetensors", "s.pt", *MLP, "--symmetry", "all", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["relation"] == "same"


def test_too_few_units_are_no_answer(onebasin, folder):
    torch.manual_seed(1)
    stranger = {key: torch.randn_like(value) for key, value in load_file(folder / "a.safetensors").items()}
    save_file(stranger, folder / "c.safetensors")
    ran = onebasin("provenance", "a.safetensors", "c.safetensors", *MLP)
    assert ran.code == 4, ran.err
    assert "Cannot tell" in ran.out


def test_strangers_are_independent(onebasin, folder):
    for seed, name in enumerate(("one", "two")):
        write_llama(folder / name, seed, intermediate_size=64)
    ran = onebasin("provenance", "one", "two", "--json")
    assert ran.code == 1, ran.err
    assert ran.record["relation"] == "independent"
    assert any("rotated" in note for note in ran.record["notes"])


def test_blocks_are_found_in_a_deeper_model(onebasin, folder):
    write_llama(folder / "few", 0, intermediate_size=64)
    write_llama(folder / "many", 1, intermediate_size=64, num_hidden_layers=3)
    assert onebasin("provenance", "many", "few", "--json").record["p_value"] > 1e-5
    transformers = pytest.importorskip("transformers")
    few, many = (transformers.LlamaForCausalLM.from_pretrained(folder / name) for name in ("few", "many"))
    for number in (1, 2):
        many.model.layers[number].load_state_dict(few.model.layers[number - 1].state_dict())
    many.save_pretrained(folder / "many")
    ran = onebasin("provenance", "many", "few", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["relation"] == "derived"
    found = [each for each in ran.record["evidence"] if each["p_value"] < 1e-6]
    assert any("layers.0." in each["group"] and "layers.1." in each["other"][0] for each in found)
    ran = onebasin("provenance", "many", "few", "--symmetry", "all")
    assert ran.code == 3
    assert "up to permutations only" in ran.err


def test_another_architecture_is_refused(onebasin, folder):
    write_llama(folder / "one", 0)
    ran = onebasin("provenance", "a.safetensors", "one", *MLP)
    assert ran.code == 3
    assert ran.err.startswith("error: ")


def test_a_level_out_of_range_is_refused(onebasin, folder):
    ran = onebasin("provenance", "a.safetensors", "b.pt", *MLP, "--level", "0.5")
    assert ran.code == 3
    assert "level must be between" in ran.err
