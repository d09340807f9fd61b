import pytest
import torch

import onebasin as ob
from tests.cli.cli_files import digest, load, write_llama
from tests.cli.cli_networks import make_mlp, make_wide_mlp

SHAPE = ("--input-shape", "1,1,8,8")
MODELS = ("--model", "cli_networks:make_mlp", "--like-model", "cli_networks:make_wide_mlp", *SHAPE)


@pytest.fixture
def files(folder):
    """n.pt, an MLP, and w.pt, a wider one."""
    torch.manual_seed(0)
    models = make_mlp(), make_wide_mlp()
    for name, model in zip("nw", models, strict=True):
        torch.save(model.state_dict(), folder / f"{name}.pt")
    return models


def test_a_file_is_widened(onebasin, folder, files):
    before = digest(folder)
    ran = onebasin("widen", "n.pt", "--like", "w.pt", "-o", "o.pt", *MODELS, "--json")
    assert ran.code == 0, ran.err
    assert ran.record["grown"]["1.weight"] == [[12, 64], [20, 64]]
    narrow, wide = files
    x = torch.randn(3, 1, 8, 8)
    expected = ob.widen(narrow, wide, x)
    wide.load_state_dict(load(folder / "o.pt"))
    assert torch.equal(wide(x), expected(x))
    assert torch.allclose(wide(x), narrow(x), atol=1e-6)
    assert {name: data for name, data in digest(folder).items() if name != "o.pt"} == before
    aligned = onebasin("align", "w.pt", "o.pt", "-o", "aligned.pt", "--model", "cli_networks:make_wide_mlp", *SHAPE)
    assert aligned.code == 0, aligned.err


def test_refusals_write_nothing(onebasin, folder, files):
    before = digest(folder)
    swapped = ("--model", "cli_networks:make_wide_mlp", "--like-model", "cli_networks:make_mlp", *SHAPE)
    for arguments, message in (
        (("w.pt", "--like", "n.pt", "-o", "o.pt", *swapped), "would have to shrink"),
        (("n.pt", "--like", "w.pt", "-o", "w.pt", *MODELS), "w.pt"),
        (("n.pt", "--like", "w.pt", "-o", "n.pt", "--force", *MODELS), "n.pt"),
        (("n.pt", "--like", "missing.pt", "-o", "o.pt", *MODELS), "missing.pt"),
    ):
        ran = onebasin("widen", *arguments)
        assert ran.code == 3, ran.err
        assert message in ran.err
    assert digest(folder) == before
    ran = onebasin("widen", "n.pt", "--like", "w.pt", "-o", "o.pt", *MODELS, "--dry-run")
    assert ran.code == 0
    assert digest(folder) == before


def test_a_folder_is_widened_and_loads(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    write_llama(folder / "a", 0)
    write_llama(folder / "b", 1, hidden_size=24, num_attention_heads=6, num_key_value_heads=3, intermediate_size=40)
    ran = onebasin("widen", "a", "--like", "b", "-o", "c")
    assert ran.code == 0, ran.err
    assert "rounded to bfloat16" in ran.err
    narrow, wide = (transformers.AutoModelForCausalLM.from_pretrained(folder / name).float() for name in "ac")
    assert wide.config.hidden_size == 24
    assert "a in the width of b" in (folder / "c" / "README.md").read_text()
    ids = torch.arange(12).view(1, 12)
    ours, theirs = wide(ids).logits, narrow(ids).logits
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    ran = onebasin("align", "b", "c", "-o", "d")
    assert ran.code == 0, ran.err


def test_other_tokenizers_are_refused(onebasin, folder):
    write_llama(folder / "a", 0)
    write_llama(folder / "b", 1, intermediate_size=40)
    for name, tokens in (("a", '{"x": 0}'), ("b", '{"y": 0}')):
        (folder / name / "vocab.json").write_text(tokens)
    ran = onebasin("widen", "a", "--like", "b", "-o", "c")
    assert ran.code == 3
    assert "the tokenizers differ in vocab.json" in ran.err
    assert onebasin("widen", "a", "--like", "b", "-o", "c", "--allow").code == 0
