"""Folders of tiny tied language models whose gains are not one, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 32, "tie_word_embeddings": True,
    },
    "GPT2LMHeadModel": {
        "n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0,
    },
    "BertForMaskedLM": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 40,
        "max_position_embeddings": 32, "type_vocab_size": 2,
    },
}  # fmt: skip


def write_tied(folder: Path, kind: str, seed: int = 0, shards: bool = True, **changes: Any) -> Any:
    """Write a tied model, and return it."""
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, kind)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**SHAPES[kind], **changes})).double().eval()
    for key, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and key.endswith("weight")
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if is_gain else torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **({"max_shard_size": "4KB"} if shards else {}))
    return model


def load_pretrained(folder: Path, kind: str) -> Any:
    """The model as transformers loads it, after a look at what it says about the load."""
    transformers = pytest.importorskip("transformers")
    found, info = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return found.eval()


def read_configuration(folder: Path) -> dict[str, Any]:
    """The content of its config.json."""
    return json.loads((folder / "config.json").read_text())
