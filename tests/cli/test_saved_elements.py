"""What `merge` did to each model is written beside the merge, and protected as all outputs are."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import onebasin as ob
from onebasin.checkpoints import move_adapter
from onebasin.symmetries.transform import load_element
from onebasin.tensors.states import LazyState
from tests.cli.cli_files import MLP, assert_same, digest, load
from tests.cli.cli_networks import make_transformer

saved_elements = pytest.importorskip("onebasin.cli.saved_elements")

MERGE = ("merge", "a.safetensors", "b.pt", "-o", "m.safetensors", *MLP)
LORA = {"base_model.model.3.lora_A.weight": torch.randn(2, 12), "base_model.model.3.lora_B.weight": torch.randn(12, 2)}


def test_a_lora_of_the_second_model_follows(onebasin, folder):
    ran = onebasin(*MERGE, "--json")
    assert ran.record["permutations"] == ["m.permutations/a.safetensors", "m.permutations/b.safetensors"]
    planted = ob.Permutation.load(folder / "p.safetensors")
    assert ob.Permutation.load(folder / "m.permutations" / "a.safetensors").is_identity
    assert ob.Permutation.load(folder / "m.permutations" / "b.safetensors") == planted.inverse()
    save_file(LORA, folder / "lora.safetensors")
    assert onebasin("apply", "m.permutations/b.safetensors", "lora.safetensors", "-o", "moved.safetensors").code == 0
    assert_same(
        load_file(folder / "moved.safetensors"), move_adapter(planted.inverse(), LazyState(LORA, LORA.__getitem__)).load()
    )
    assert onebasin("apply", "m.permutations/b.safetensors", "b.pt", "-o", "c.pt").code == 0
    assert_same(load(folder / "c.pt"), load(folder / "a.safetensors"))


def test_a_folder_gets_them_beside_it(onebasin, folder):
    (folder / "la").mkdir()
    shutil.copy(folder / "a.safetensors", folder / "la" / "model.safetensors")
    assert onebasin("merge", "la", "b.pt", "-o", "out.v1", *MLP).code == 0
    assert {file.name for file in (folder / "out.v1").iterdir()} == {"model.safetensors", "README.md"}
    assert {file.name for file in (folder / "out.v1.permutations").iterdir()} == {"la.safetensors", "b.safetensors"}


def test_models_that_all_move_are_undone_by_their_own(onebasin, folder):
    """The models moved by their permutations have the merge as their mean, also where the first one moves."""
    for seed, name in ((5, "c.pt"), (6, "d.pt")):
        torch.manual_seed(seed)
        torch.save({key: torch.randn_like(value) for key, value in load(folder / "b.pt").items()}, folder / name)
    files = ("a.safetensors", "c.pt", "d.pt")
    ran = onebasin("merge", *files, "-o", "m.pt", *MLP, "--reference", "common", "--method", "weight-matching", "--json")
    elements = [load_element(folder / path) for path in ran.record["permutations"]]
    states = [element.apply(load(folder / file)) for element, file in zip(elements, files, strict=True)]
    for key, value in load(folder / "m.pt").items():
        torch.testing.assert_close(value, sum(state[key] for state in states) / 3)


def test_transforms(onebasin, folder):
    """They move the canonical forms of the models, whose mean is the merge."""
    forms = []
    for seed, name in enumerate(("x.pt", "y.pt")):
        torch.manual_seed(seed)
        network, inputs = make_transformer()
        torch.save(network.state_dict(), folder / name)
        forms.append(ob.canonical(network, inputs).state)
    model = ("--model", "cli_networks:make_transformer", "--method", "weight-matching", "--set", "max_sweeps=1")
    ran = onebasin("merge", "x.pt", "y.pt", "-o", "m.pt", *model, "--symmetry", "all", "--json")
    assert ran.record["permutations"] == ["m.transforms/x.safetensors", "m.transforms/y.safetensors"]
    first, second = (load_element(folder / path) for path in ran.record["permutations"])
    assert second.matrices
    x, y = first.apply(forms[0]), second.apply(forms[1])
    for key, value in load(folder / "m.pt").items():
        torch.testing.assert_close(value, (x[key] + y[key]) / 2)


def test_transforms_of_other_networks_are_not_written(onebasin, folder):
    torch.manual_seed(5)
    torch.save({key: torch.randn_like(value) for key, value in load(folder / "b.pt").items()}, folder / "c.pt")
    merge = ("merge", "a.safetensors", "c.pt", "-o", "m.pt", *MLP, "--symmetry", "positive", "--method", "weight-matching")
    ran = onebasin(*merge, "--repair", "repair", "--data", "cli_networks:batches", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["permutations"] is None
    assert any("no transforms were written" in note for note in ran.record["notes"])
    assert not (folder / "m.transforms").exists()


def test_the_place_can_be_chosen_or_left_out(onebasin, folder):
    assert onebasin(*MERGE, "--permutations", "moves").code == 0
    assert {file.name for file in (folder / "moves").iterdir()} == {"a.safetensors", "b.safetensors"}
    assert onebasin(*MERGE, "--no-permutations", "--force").code == 0
    assert not (folder / "m.permutations").exists()
    assert onebasin(*MERGE, "--no-permutations", "--force", "--json").record["permutations"] is None
    ran = onebasin(*MERGE, "--no-permutations", "--permutations", "moves")
    assert ran.code == 2
    assert "give one of --permutations and --no-permutations" in ran.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "m.permutations exists already"),
        (("--permutations", "taken"), "taken exists already"),
        (("--permutations", "taken", "--force"), "taken holds mine.txt, which would be lost"),
        (("--permutations", "a.safetensors", "--force"), "inputs are never changed"),
        (("--permutations", ".", "--force"), "inputs are never changed"),
        (("--permutations", "m.safetensors", "--force"), "is in the way of another output"),
        (("--permutations", "r.html", "--report", "r.html"), "is in the way of another output"),
        (("--permutations", "r", "--report", "r/r.html", "--force"), "the folder r does not exist"),
        (("--permutations", "link", "--force"), "is a link"),
        (("--permutations", "no/where"), "the folder no does not exist"),
        (("--permutations", "la/inside"), "inputs are never changed"),
    ],
)
def test_nothing_is_lost(onebasin, folder, more, message):
    (folder / "m.permutations").mkdir()
    (folder / "taken").mkdir()
    (folder / "taken" / "mine.txt").write_text("mine")
    (folder / "link").symlink_to("taken")
    (folder / "la").mkdir()
    shutil.copy(folder / "a.safetensors", folder / "la" / "model.safetensors")
    merge = ("merge", "la", "b.pt", "-o", "m", *MLP) if "la/inside" in more else MERGE
    before = digest(folder)
    ran = onebasin(*merge, *more)
    assert ran.code == 3
    assert message in " ".join(ran.err.split())
    assert digest(folder) == before
    assert list((folder / "m.permutations").iterdir()) == []


def test_force_and_dry_runs(onebasin, folder):
    assert onebasin(*MERGE).code == 0
    before = digest(folder)
    ran = onebasin(*MERGE, "--force", "--dry-run", "--json")
    written = ["m.permutations/a.safetensors", "m.permutations/b.safetensors"]
    assert ran.record["would_replace"] == ["m.safetensors", *written]
    assert digest(folder) == before
    assert onebasin(*MERGE, "--force").code == 0
    assert digest(folder).keys() == before.keys()


def test_names(tmp_path, monkeypatch):
    path = type(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = saved_elements.name_models
    assert names([path("x/b.pt"), path("y/b.pt"), path("c")]) == ["1-b", "2-b", "3-c"]
    assert names([path("."), path("b.ckpt")]) == [tmp_path.name, "b"]
    assert all(len(name) < 50 for name in names([path("n" * 150), path("b")]))
    assert names([path(".."), path("b")])[1] == "2-b"
