import shutil

import torch
from safetensors.torch import load_file, save_file

import onebasin as ob
from onebasin.checkpoints.hashing import hash_file
from tests.cli.cli_files import assert_same, digest, load
from tests.cli.cli_networks import make_mlp, make_transformer, make_with_inputs


def test_apply_moves_and_moves_back(onebasin, folder):
    assert onebasin("apply", "p.safetensors", "a.safetensors", "-o", "m.safetensors").code == 0
    assert_same(load(folder / "m.safetensors"), load(folder / "b.pt"))
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "back.pt", "--inverse", "--json")
    assert ran.record["kind"] == "model"
    assert_same(load(folder / "back.pt"), load(folder / "a.safetensors"))


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


def test_force_replaces_folders_only_if_all_in_them_is_written_anew(onebasin, folder):
    (folder / "a").mkdir()
    shutil.copy(folder / "a.safetensors", folder / "a" / "model.safetensors")
    command = ("apply", "p.safetensors", "a", "-o", "c")
    assert onebasin(*command).code == 0
    card = (folder / "c" / "README.md").read_text()
    assert "a, moved by a permutation by onebasin" in card
    assert hash_file(folder / "p.safetensors") in card
    assert onebasin(*command).code == 3
    assert onebasin(*command, "--force").code == 0
    for name in ("pytorch_model.bin", "other.pt", "other.safetensors", "notes.txt", "notes.odt", "config.json"):
        (folder / "c" / name).write_text("mine")
        before = digest(folder)
        ran = onebasin(*command, "--force")
        assert ran.code == 3
        assert f"c holds {name}, which would be lost" in ran.err
        assert digest(folder) == before
        (folder / "c" / name).unlink()


def test_a_full_disk_is_told_before_any_work(onebasin, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "c.pt")
    assert ran.code == 3
    assert "0.00 GB are free there" in ran.err
    assert not (folder / "c.pt").exists()


def test_transforms_are_told_from_permutations(onebasin, folder):
    model, inputs = make_with_inputs()
    model.load_state_dict(load(folder / "a.safetensors"))
    symmetry = ob.symmetry(model, inputs, kinds="positive")
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    transform.save(folder / "t.safetensors")
    ran = onebasin("apply", "t.safetensors", "a.safetensors", "-o", "m.pt")
    assert ran.code == 0
    assert "positive scales: 2, changes of basis: 0" in ran.out
    for key, value in load(folder / "m.pt").items():
        torch.testing.assert_close(value, transform.apply(model)[key])
    assert onebasin("apply", "t.safetensors", "m.pt", "-o", "back.pt", "--inverse").code == 0
    for key, value in load(folder / "back.pt").items():
        torch.testing.assert_close(value, model.state_dict()[key])
    lora = {"3.lora_A.weight": torch.randn(2, 12), "3.lora_B.weight": torch.randn(12, 2)}
    save_file(lora, folder / "lora.safetensors")
    assert onebasin("apply", "t.safetensors", "lora.safetensors", "-o", "l.safetensors", "--json").record["kind"] == "lora"
    moved = load_file(folder / "l.safetensors")
    expected = transform.apply_difference({"3.weight": lora["3.lora_B.weight"] @ lora["3.lora_A.weight"]})
    torch.testing.assert_close(moved["3.lora_B.weight"] @ moved["3.lora_A.weight"], expected["3.weight"])


def test_what_a_transform_cannot_move_is_refused(onebasin, folder):
    model, inputs = make_transformer()
    ob.Transform.random(ob.symmetry(model, inputs, kinds="all")).save(folder / "t.safetensors")
    state = model.state_dict()
    optimizer = torch.optim.Adam(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "adam.pt")
    torch.save({**state, "1.norm1.weight": torch.full((8,), 2.0)}, folder / "gains.pt")
    torch.save({key: value for key, value in state.items() if key != "0.bias"}, folder / "less.pt")
    before = digest(folder)
    for arguments, message in (
        (("t.safetensors", "adam.pt"), "the optimiser trains '1.norm1.weight', which has no counterpart in another basis"),
        (("t.safetensors", "gains.pt"), "'1.norm1.weight' must be filled with 1"),
        (("t.safetensors", "gains.pt", "--kind", "task-vector"), "'1.norm1.weight' differs between the two states"),
        (("t.safetensors", "less.pt"), "less.pt has no '0.bias'"),
        (("t.safetensors", "a.safetensors"), "'1.bias' in a.safetensors is not in the model"),
        (("a.safetensors", "gains.pt"), "a.safetensors is neither a onebasin permutation nor a onebasin transform"),
    ):
        ran = onebasin("apply", *arguments, "-o", "out.pt")
        assert ran.code == 3
        assert message in ran.err
    assert digest(folder) == before
    difference = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save(difference, folder / "vector.pt")
    ran = onebasin("apply", "t.safetensors", "vector.pt", "-o", "out.pt", "--kind", "task-vector")
    assert ran.code == 0
    assert "this transform is for models in canonical form, and the file must belong to such a one" in ran.err


def test_moments_follow_signs(onebasin, folder):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)), torch.randn(4, 3)
    transform = ob.Transform.random(ob.symmetry(model, x, kinds="all"))
    transform.save(folder / "t.safetensors")
    optimizer = torch.optim.Adam(model.named_parameters())
    model(x).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "adam.pt")
    ran = onebasin("apply", "t.safetensors", "adam.pt", "-o", "moved.pt")
    assert ran.code == 0, ran.err
    found, expected = torch.load(folder / "moved.pt"), transform.apply_optimizer(optimizer, model)
    assert any(bool((matrix < 0).any()) for matrix in transform.matrices.values())
    for number, entries in expected["state"].items():
        assert all(torch.equal(found["state"][number][name], value) for name, value in entries.items())


def test_what_does_not_exist_is_said_not_to(onebasin, folder):
    for kind in ("auto", "model", "lora", "task-vector", "optimizer"):
        ran = onebasin("apply", "p.safetensors", "nothere.pt", "--kind", kind, "-o", "z.pt")
        assert ran.code == 3
        assert "there is no file or folder nothere.pt" in ran.err
