"""Small checkpoints on disk, and a look at what a run left."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.checkpoints import open_checkpoint
from tests.cli.cli_networks import make_with_inputs

MLP = ("--model", "cli_networks:make_with_inputs")


def write_pair(folder: Path) -> None:
    torch.manual_seed(0)
    model, inputs = make_with_inputs()
    symmetry = ob.symmetry(model, inputs)
    planted = symmetry.random(torch.Generator().manual_seed(1))
    save_file(model.state_dict(), folder / "a.safetensors")
    torch.save(planted.apply(model), folder / "b.pt")
    planted.save(folder / "p.safetensors")


def write_llama(folder: Path, seed: int, **changes: Any) -> None:
    """A tiny Llama in bfloat16, in shards, with a file that stands for its tokenizer."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})).to(torch.bfloat16)
    for parameter in model.parameters():  # norms begin as ones, which would tell nothing apart
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size="4KB")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def digest(folder: Path) -> dict[str, bytes]:
    """The content of every file, temporary ones included."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def run_forked(arguments: list[str], log: Path, seconds: int = 60) -> tuple[int, str]:
    """Exit code and output of the command line in a child, which may crash or hang; a signal counts as -number."""
    child = os.fork()
    if child == 0:
        import signal

        from onebasin.cli.app import run

        code = 99
        try:
            signal.alarm(seconds)
            with log.open("w") as stream:
                sys.stdout = sys.stderr = stream
                code = run(arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text()


def load(path: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(path).load()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key
