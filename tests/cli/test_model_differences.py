"""Models whose tensors have the same shapes, and that still do not belong together."""

import json

import pytest
import torch

from tests.cli.cli_files import digest, write_llama

DATA = ("--data", "cli_networks:tokens", "--loss", "cli_networks:next_token")
COMMANDS = {
    "align": ("align", "a", "b", "-o", "c"),
    "merge": ("merge", "a", "b", "-o", "c"),
    "barrier": ("barrier", "a", "b", *DATA, "--points", "2", "--no-check"),
}


@pytest.fixture
def llamas(folder):
    """Two folders, a and b, with tokenizers."""
    for seed, name in enumerate("ab"):
        write_llama(folder / name, seed=seed)
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0, "y": 1}}}))
    return folder


def change(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("command", COMMANDS)
def test_configurations_that_differ_are_refused(onebasin, llamas, command):
    change(
        llamas / "b" / "config.json", hidden_act="relu", num_attention_heads=4, _name_or_path="elsewhere", use_cache=False
    )
    before = digest(llamas)
    ran = onebasin(*COMMANDS[command])
    assert ran.code == 3
    assert "hidden_act is silu in a and relu in b; --allow" in " ".join(ran.err.split())
    assert digest(llamas) == before
    ran = onebasin(*COMMANDS[command], "--allow", "--json")
    assert ran.code == 0
    assert "hidden_act is silu in a and relu in b" in ran.record["notes"]


@pytest.mark.parametrize("command", COMMANDS)
def test_tokenizers_that_differ_are_refused(onebasin, llamas, command):
    change(llamas / "b" / "tokenizer.json", model={"vocab": {"x": 1, "y": 0}})
    ran = onebasin(*COMMANDS[command])
    assert ran.code == 3
    assert "the tokenizers differ in 2 tokens, such as x, which is 0 in a and 1 in b" in " ".join(ran.err.split())


def test_heads_that_shapes_do_not_show(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    for seed, (name, heads) in enumerate({"a": 4, "b": 8, "same": 4}.items()):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=heads, vocab_size=32, n_positions=16)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / name)
    ran = onebasin("align", "a", "b", "-o", "c")
    assert ran.code == 3
    assert "n_head is 4 in a and 8 in b" in " ".join(ran.err.split())
    # The weight files and the architecture by name are the same models.
    ran = onebasin("align", "a/model.safetensors", "b/model.safetensors", "-o", "c.safetensors", "--model", "a")
    assert ran.code == 3
    assert "n_head is 4 in a and 8 in b" in " ".join(ran.err.split())
    assert onebasin("align", "a", "same", "-o", "c").code == 0
    permutation = "c/permutation.safetensors"
    before = digest(folder)
    ran = onebasin("apply", permutation, "b", "-o", "d")
    assert ran.code == 3
    assert "n_head is 4 in c and 8 in b" in " ".join(ran.err.split())
    assert digest(folder) == before
    assert onebasin("apply", permutation, "same", "-o", "d").code == 0
    ran = onebasin("apply", permutation, "b", "-o", "e", "--allow", "--json")
    assert ran.code == 0
    assert ran.record["notes"] == ["n_head is 4 in c and 8 in b"]
