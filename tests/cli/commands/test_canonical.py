import pytest
import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.checkpoints.hashing import hash_file
from tests.cli.cli_files import assert_same, digest, load, write_llama
from tests.cli.cli_networks import make_transformer

TRANSFORMER = ("--model", "cli_networks:make_transformer")


@pytest.fixture
def gained(folder):
    """x.pt, a transformer whose gains are not one."""
    torch.manual_seed(0)
    model, inputs = make_transformer()
    for name, parameter in model.named_parameters():
        if "norm" in name or name == "2.weight":
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    torch.save(model.state_dict(), folder / "x.pt")
    return model, inputs


def test_gains_are_folded_and_the_function_stays(onebasin, folder, gained):
    ran = onebasin("canonical", "x.pt", "-o", "c.pt", *TRANSFORMER, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["folded"] == ["1.norm1.weight", "1.norm2.weight", "2.weight"]
    assert ran.record["left"] == {}
    assert "0.weight" in ran.record["centred"]
    assert ran.record["uncentred"] == {}
    found = load(folder / "c.pt")
    assert_same(found, dict(ob.canonical(*gained).state))
    assert bool((found["1.norm1.weight"] == 1).all())
    assert onebasin("verify", "x.pt", "c.pt", *TRANSFORMER, "--tolerance", "1e-6").code == 0
    ran = onebasin("canonical", "c.pt", "-o", "d.pt", *TRANSFORMER)
    assert "nothing: every gain is one, or cannot be folded" in ran.out
    assert "centred" not in ran.out
    assert_same(load(folder / "d.pt"), found)


def test_what_was_done_can_be_applied_to_a_task_vector(onebasin, folder, gained):
    model, inputs = gained
    ran = onebasin("canonical", "x.pt", "-o", "c.pt", *TRANSFORMER, "--fold", "x.fold.safetensors", "--json")
    assert ran.code == 0, ran.err
    assert ran.record["fold"] == "x.fold.safetensors"
    vector = {"1.linear1.weight": torch.randn_like(model.state_dict()["1.linear1.weight"])}
    torch.save(vector, folder / "v.pt")
    ran = onebasin("apply", "x.fold.safetensors", "v.pt", "-o", "w.pt", "--kind", "task-vector")
    assert ran.code == 0, ran.err
    expected = ob.canonical(model, inputs).fold.apply_difference(vector)["1.linear1.weight"]
    assert torch.equal(load(folder / "w.pt")["1.linear1.weight"], expected)
    assert not torch.equal(expected, vector["1.linear1.weight"])


def test_a_negative_gain_is_refused_where_a_fold_is_asked_for(onebasin, folder, gained):
    model, _ = gained
    with torch.no_grad():
        model.get_parameter("2.weight")[0] *= -1
    torch.save(model.state_dict(), folder / "x.pt")
    ran = onebasin("canonical", "x.pt", "-o", "c.pt", *TRANSFORMER, "--fold", "x.fold.safetensors")
    assert ran.code == 3
    assert "a gain is negative" in ran.err
    assert not (folder / "c.pt").exists()


def test_folders_keep_their_layout_and_what_stays_is_told(onebasin, folder):
    write_llama(folder / "t", seed=0)
    ran = onebasin("canonical", "t", "-o", "c", "--json")
    assert ran.code == 0, ran.err
    assert list(ran.record["left"]) == ["model.norm.weight"]
    assert "c is rounded to bfloat16" in ran.err
    assert digest(folder / "c").keys() == digest(folder / "t").keys() | {"README.md"}
    card = (folder / "c" / "README.md").read_text()
    assert "t in canonical form, by onebasin" in card
    assert hash_file(folder / "t" / "model-00001-of-00003.safetensors") in card
    assert {value.dtype for value in load(folder / "c").values()} == {torch.bfloat16}
    assert onebasin("verify", "t", "c", "--tolerance", "0.05").code == 0


@pytest.mark.usefixtures("gained")
def test_bad_input_is_refused_and_nothing_is_replaced(onebasin, folder):
    save_file({"w": torch.zeros(2)}, folder / "other.safetensors")
    (folder / "taken.pt").write_bytes(b"mine")
    before = digest(folder)
    for arguments, message in (
        (("x.pt", "-o", "c.pt"), "the files do not tell their architecture"),
        (("other.safetensors", "-o", "c.pt", *TRANSFORMER), "is not a checkpoint of this model"),
        (("x.pt", "-o", "taken.pt", *TRANSFORMER), "taken.pt exists already"),
        (("x.pt", "-o", "x.pt", *TRANSFORMER, "--force"), "inputs are never changed"),
        (("none.pt", "-o", "c.pt", *TRANSFORMER), "none.pt"),
    ):
        ran = onebasin("canonical", *arguments)
        assert ran.code == 3
        assert message in ran.err
    ran = onebasin("canonical", "x.pt", "-o", "c.pt", *TRANSFORMER, "--dry-run")
    assert ran.code == 0
    assert "would write c.pt; nothing was written" in ran.out
    assert digest(folder) == before


def test_balanced_weights_are_smaller_and_compute_the_same(onebasin, folder, gained):
    plain = onebasin("canonical", "x.pt", "-o", "c.pt", *TRANSFORMER, "--json")
    ran = onebasin("canonical", "x.pt", "-o", "e.pt", *TRANSFORMER, "--balanced", "--json")
    assert (plain.code, ran.code) == (0, 0), ran.err
    assert (plain.record["balanced"], ran.record["balanced"]) == (False, True)
    assert_same(load(folder / "e.pt"), dict(ob.canonical(*gained, balanced=True).state))
    sizes = [sum(float(v.square().sum()) for v in load(folder / name).values()) for name in ("e.pt", "c.pt")]
    assert sizes[0] < 0.99 * sizes[1]
    assert onebasin("verify", "x.pt", "e.pt", *TRANSFORMER, "--tolerance", "1e-6").code == 0
    ran = onebasin("canonical", "x.pt", "-o", "d.pt", *TRANSFORMER, "--balanced", "--fold", "x.fold.safetensors")
    assert ran.code == 2
    assert "--balanced does more" in " ".join(ran.err.replace("│", " ").split())
    assert not (folder / "d.pt").exists()
