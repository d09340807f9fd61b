import shutil

import torch
from cli_files import assert_same, load
from cli_networks import make_mlp
from safetensors.torch import load_file, save_file

import onebasin as ob


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


def test_a_full_disk_is_told_before_any_work(onebasin, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5))
    ran = onebasin("apply", "p.safetensors", "b.pt", "-o", "c.pt")
    assert ran.code == 3
    assert "0.00 GB are free there" in ran.err
    assert not (folder / "c.pt").exists()
