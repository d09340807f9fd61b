import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

import onebasin as ob
from tests.cli.cli_files import digest, load, write_llama
from tests.cli.cli_networks import make_transformer

MLP = ("--model", "cli_networks:make_mlp", "--input-shape", "1,1,8,8")


@pytest.fixture
def fine(folder):
    """f.pt, trained further from a.safetensors; b.pt is a permuted copy of a, by p.safetensors."""
    torch.manual_seed(0)
    state = {key: value + 0.1 * torch.randn_like(value) for key, value in load_file(folder / "a.safetensors").items()}
    torch.save(state, folder / "f.pt")
    return state


def test_a_fine_tune_arrives_in_the_order_of_the_new_base(onebasin, folder, fine):
    before = digest(folder)
    ran = onebasin("port", "f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "o.pt", *MLP, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["kind"] == "model"
    assert ran.record["scale"] == 1.0
    moved = ob.Permutation.load(folder / "p.safetensors").apply(fine)
    for key, value in load(folder / "o.pt").items():
        assert torch.allclose(value, moved[key], atol=1e-6)
    assert {name: data for name, data in digest(folder).items() if name != "o.pt"} == before


def test_the_best_of_several_scales_is_taken(onebasin, folder, fine):
    arguments = ("port", "f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "o.pt", *MLP)
    ran = onebasin(
        *arguments, "--scale", "0", "--scale", "1", "--data", "cli_networks:batches", "--method", "weight-matching", "--json"
    )
    assert ran.code == 0, ran.err
    losses = ran.record["losses"]
    assert float(min(losses, key=losses.get)) == ran.record["scale"]
    assert set(losses) == {"0.0", "1.0"}
    ran = onebasin(*arguments, "--scale", "0", "--scale", "1", "--force")
    assert ran.code == 2
    assert "--data" in ran.err


def test_a_lora_stays_a_lora(onebasin, folder):
    torch.manual_seed(0)
    lora = {"base_model.model.3.lora_A.weight": torch.randn(2, 12), "base_model.model.3.lora_B.weight": torch.randn(12, 2)}
    save_file(lora, folder / "lora.safetensors")
    arguments = ("port", "lora.safetensors", "--base", "a.safetensors", "--to", "b.pt", "-o", "l.safetensors", *MLP)
    ran = onebasin(*arguments, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["kind"] == "lora"
    assert onebasin("apply", "p.safetensors", "lora.safetensors", "-o", "m.safetensors").code == 0
    ours, theirs = (load_file(folder / f"{name}.safetensors") for name in "lm")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    ran = onebasin(*arguments, "--scale", "0.5", "--force")
    assert ran.code == 3
    assert "its scale is set where it is loaded" in ran.err


@pytest.fixture
def rotated(folder):
    """old.pt; new.pt, which computes the same in another basis and with other gains; a LoRA of the first; both models."""
    torch.manual_seed(0)
    old, inputs = make_transformer()
    for norm in (old[1].norm1, old[1].norm2, old[2]):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    form = ob.canonical(old, inputs)
    new = copy.deepcopy(old)
    new.load_state_dict(form.state)
    planted = ob.Transform.random(ob.symmetry(new, inputs, kinds="all"), torch.Generator().manual_seed(0))
    other = ob.Transform(form.fold.permutation, {name: 0.5 * torch.randn(8) for name in form.fold.logarithms})
    new.load_state_dict(other.apply(planted.apply(form.state)))
    torch.save(old.state_dict(), folder / "old.pt")
    torch.save(new.state_dict(), folder / "new.pt")
    lora = {}
    for name in ("0", "1.linear1", "1.linear2", "1.self_attn.out_proj", "3"):
        out, inputs_of = old.get_submodule(name).weight.shape
        lora[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(2, inputs_of)
        lora[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 2)
    save_file(lora, folder / "lora.safetensors")
    return old, new, inputs


def add(model, lora):
    result = copy.deepcopy(model)
    for key in (key for key in lora if "lora_A" in key):
        weight = result.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")).weight
        weight.data += lora[key.replace("_A", "_B")] @ lora[key]
    return result


TRANSFORMER = ("--model", "cli_networks:make_transformer", "--symmetry", "all")


def test_a_lora_follows_changes_of_basis_and_gains(onebasin, folder, rotated):
    old, new, inputs = rotated
    ran = onebasin("port", "lora.safetensors", "--base", "old.pt", "--to", "new.pt", "-o", "o.safetensors", *TRANSFORMER)
    assert ran.code == 0, ran.err
    given, found = (load_file(folder / name) for name in ("lora.safetensors", "o.safetensors"))
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in given.items()}
    expected = add(old, given)(inputs)
    torch.testing.assert_close(add(new, found)(inputs), expected, rtol=1e-3, atol=1e-3)
    assert (add(new, given)(inputs) - expected).abs().max() > 0.1


def test_a_model_follows_changes_of_basis_and_imitates_further(onebasin, folder, rotated):
    old, new, inputs = rotated
    tuned = add(old, load_file(folder / "lora.safetensors"))
    torch.save(tuned.state_dict(), folder / "tuned.pt")
    command = ("port", "tuned.pt", "--base", "old.pt", "--to", "new.pt", "-o", "o.pt", *TRANSFORMER)
    ran = onebasin(*command)
    assert ran.code == 0, ran.err
    new.load_state_dict(load(folder / "o.pt"))
    torch.testing.assert_close(new(inputs), tuned(inputs), rtol=1e-3, atol=1e-3)
    ran = onebasin(*command, "--imitate", "cli_networks:sequences", "--force", "--json")
    assert ran.code == 0, ran.err
    assert any("in 200 steps of imitation" in note for note in ran.record["notes"])
    assert ran.record["imitate"] == "cli_networks:sequences"
    new.load_state_dict(load(folder / "o.pt"))
    torch.testing.assert_close(new(inputs), tuned(inputs), rtol=1e-2, atol=1e-2)


def test_an_imitation_without_scales_or_of_a_lora_is_refused(onebasin, folder, rotated, fine):
    ran = onebasin("port", "f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "o.pt", *MLP, "--imitate", "written")
    assert ran.code == 2
    assert "--symmetry" in ran.err
    command = ("port", "lora.safetensors", "--base", "old.pt", "--to", "new.pt", "-o", "o.safetensors", *TRANSFORMER)
    ran = onebasin(*command, "--imitate", "written")
    assert ran.code == 3
    assert "merge it into its base" in ran.err
    ran = onebasin(*command, "--imitate", "text")
    assert ran.code == 3
    assert "--imitate (or written)" in ran.err
    assert not list(folder.glob("o.*"))


def test_a_language_model_imitates_what_its_fine_tune_writes(onebasin, folder):
    for seed, name in enumerate(("old", "new", "tuned")):
        write_llama(folder / name, seed)
    ran = onebasin(
        "port",
        "tuned",
        "--base",
        "old",
        "--to",
        "new",
        "-o",
        "o",
        "--symmetry",
        "positive",
        "--imitate",
        "written",
        "--json",
    )
    assert ran.code == 0, ran.err
    assert any("learned further" in note for note in ran.record["notes"])


def test_a_lora_that_cannot_follow_is_refused(onebasin, folder, rotated):
    old, _, _ = rotated
    command = ("port", "lora.safetensors", "--base", "old.pt", "--to", "new.pt", "-o", "o.safetensors", *TRANSFORMER)
    state = old.state_dict()
    torch.save({**state, "2.weight": -state["2.weight"]}, folder / "old.pt")
    ran = onebasin(*command)
    assert ran.code == 3
    assert "a gain of the old base has entries below zero" in ran.err
    save_file({"base_model.model.9.lora_A.weight": torch.zeros(2, 8)}, folder / "lora.safetensors")
    ran = onebasin(*command)
    assert ran.code == 3
    assert "belongs to '9.weight'" in ran.err
    assert not (folder / "o.safetensors").exists()


def test_refusals_write_nothing(onebasin, folder, fine):
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "other.pt")
    before = digest(folder)
    for arguments, message in (
        (("f.pt", "--base", "a.safetensors", "--to", "other.pt", "-o", "o.pt"), "other.pt"),
        (("f.pt", "--base", "other.pt", "--to", "b.pt", "-o", "o.pt"), "other.pt"),
        (("f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "b.pt", "--force"), "b.pt"),
        (("f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "a.safetensors", "--force"), "a.safetensors"),
        (("missing.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "o.pt"), "missing.pt"),
    ):
        ran = onebasin("port", *arguments, *MLP)
        assert ran.code == 3, ran.err
        assert message in ran.err
    assert onebasin("port", "f.pt", "--base", "a.safetensors", "--to", "b.pt", "-o", "o.pt", *MLP, "--dry-run").code == 0
    assert digest(folder) == before


def test_a_folder_is_ported_and_loads(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    for name, seed in (("old", 0), ("fine", 1), ("new", 2)):
        write_llama(folder / name, seed)
    ran = onebasin("port", "fine", "--base", "old", "--to", "new", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert "What fine has more than old, carried over to new" in (folder / "out" / "README.md").read_text()
