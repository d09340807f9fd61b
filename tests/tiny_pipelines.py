"""Tiny pipelines of diffusers on disk: every part has a few thousand parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

WIDTHS = {"block_out_channels": (4, 8), "norm_num_groups": 2, "layers_per_block": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **WIDTHS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4, "num_class_embeds": 3,
    },
    "UNet2DConditionModel": {
        **WIDTHS, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 8,
        "up_block_types": ("UpBlock2D", "UpBlock2D"), "attention_head_dim": 2, "sample_size": 8,
    },
    "AutoencoderKL": {
        **WIDTHS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (4, 4), "decoder_block_out_channels": (4, 4), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "VQModel": {
        **WIDTHS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "num_vq_embeddings": 6,
    },
    "SD3Transformer2DModel": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 4, "sample_size": 8, "in_channels": 4,
        "out_channels": 4, "joint_attention_dim": 8, "caption_projection_dim": 8, "pooled_projection_dim": 6,
        "pos_embed_max_size": 6,
    },
    "FluxTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 8,
        "axes_dims_rope": (4, 4, 4), "joint_attention_dim": 8, "pooled_projection_dim": 6, "guidance_embeds": True,
    },
    "DiTTransformer2DModel": {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 4, "sample_size": 8, "num_embeds_ada_norm": 5,
    },
    "PixArtTransformer2DModel": {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 6, "sample_size": 8, "cross_attention_dim": 12,
        "caption_channels": 6, "use_additional_conditions": True,
    },
}  # fmt: skip
"""For every class that is known, a small configuration."""


def make_model(name: str, seed: int, **changes: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    return draw_weights(getattr(diffusers, name)(**{**CONFIGURATIONS[name], **changes}))


def make_text_encoder(seed: int, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40,
        "max_position_embeddings": 12, "bos_token_id": 38, "eos_token_id": 39, "pad_token_id": 39,
    }  # fmt: skip
    torch.manual_seed(seed)
    return draw_weights(transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**sizes, **changes})))


def draw_weights(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():  # norms begin as ones, which would tell nothing apart
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def write_pipeline(folder: Path, models: dict[str, Any], **others: Any) -> None:
    """A pipeline of these models with a tokenizer and a scheduler; `others` are further entries of its index."""
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.0"}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        index[name] = [type(model).__module__.partition(".")[0], type(model).__name__]
    index |= {"scheduler": ["diffusers", "DDIMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "image_encoder": [None, None]}
    (folder / "model_index.json").write_text(json.dumps({**index, "requires_safety_checker": False, **others}))
    schedule = {"_class_name": "DDIMScheduler", "clip_sample": False, "steps_offset": 1, "prediction_type": "epsilon"}
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(schedule))
    (folder / "tokenizer").mkdir()
    vocabulary = {**{f"t{number}": number for number in range(38)}, "<|startoftext|>": 38, "<|endoftext|>": 39}
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")


def write_small_pipeline(folder: Path, seed: int) -> None:
    """One that is traced in a second: a text encoder and an autoencoder."""
    write_pipeline(folder, {"text_encoder": make_text_encoder(seed), "vae": make_model("AutoencoderTiny", seed)})
