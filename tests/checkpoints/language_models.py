"""Tiny Hugging Face models in folders."""

from pathlib import Path
from typing import Any

import pytest
import torch

SMALL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 90, "n_positions": 40},
    "BertForMaskedLM": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 90,
        "max_position_embeddings": 40, "type_vocab_size": 3,
    },
    "LlamaForCausalLM": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 90,
        "max_position_embeddings": 40,
    },
    "T5ForConditionalGeneration": {
        "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 90, "decoder_start_token_id": 0,
    },
    "RobertaForMaskedLM": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 90,
        "max_position_embeddings": 42, "type_vocab_size": 2,
    },
}  # fmt: skip


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a class of transformers with random weights, norms included."""
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, kind)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**SMALL[kind], **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save_model(folder: Path, model: Any, **changes: Any) -> Path:
    """Save a model, and change the configuration that stands beside it."""
    model.save_pretrained(folder)
    if changes:
        model.config.__class__.from_dict({**model.config.to_dict(), **changes}).save_pretrained(folder)
    return folder
