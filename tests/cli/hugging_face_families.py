"""Tiny models of many families of Hugging Face's transformers, saved and loaded in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

_LAYER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_TEXT = {"vocab_size": 40, **_LAYER}
_BERT = {**_TEXT, "max_position_embeddings": 32, "type_vocab_size": 2}
_LLAMA = {**_TEXT, **_ENDS, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
_GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32, **_ENDS}
_NEO = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
_OPT = {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
_DISTILBERT = {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 4, "max_position_embeddings": 32}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
_SEQUENCES = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_BART = {**_SEQUENCES, "max_position_embeddings": 32}
_WHISPER = {
    **_SEQUENCES, "num_mel_bins": 6, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
_SOUND = {
    **_TEXT, "conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_IMAGES = {**_LAYER, "image_size": 8, "patch_size": 4}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}
_CONVNEXT = {"hidden_sizes": [4, 6, 8, 10], "depths": [1, 1, 1, 1], "image_size": 32}
_RESNET = {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
_PAIR = {
    "text_config": {**_BERT, "projection_dim": 12, "bos_token_id": 0, "eos_token_id": 39, "pad_token_id": 1},
    "vision_config": {**_IMAGES, "projection_dim": 12},
}


class Family(NamedTuple):
    """A model class and its tiny configuration; and whether it computes in float32 at most, in part or whole."""

    model: str
    config: dict[str, Any]
    float32: bool = False


FAMILIES = {
    "bert": Family("BertForMaskedLM", _BERT),
    "roberta": Family("RobertaForMaskedLM", {**_BERT, "max_position_embeddings": 34}),
    "distilbert": Family("DistilBertForMaskedLM", _DISTILBERT),
    "albert": Family("AlbertForMaskedLM", {**_BERT, "embedding_size": 12}),
    "electra": Family("ElectraForMaskedLM", {**_BERT, "embedding_size": 12}),
    "deberta-v2": Family("DebertaV2ForMaskedLM", {**_BERT, **_DEBERTA}),
    "gpt2": Family("GPT2LMHeadModel", _GPT),
    "gpt_neo": Family("GPTNeoForCausalLM", {**_NEO, **_ENDS, "vocab_size": 40, "max_position_embeddings": 32}, True),
    "gpt_neox": Family("GPTNeoXForCausalLM", {**_TEXT, **_ENDS, "max_position_embeddings": 32}),
    "gptj": Family("GPTJForCausalLM", {**_GPT, "rotary_dim": 2}, True),
    "opt": Family("OPTForCausalLM", _OPT),
    "bloom": Family("BloomForCausalLM", {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "falcon": Family("FalconForCausalLM", {**_TEXT, **_ENDS}),
    "llama": Family("LlamaForCausalLM", _LLAMA, True),
    "mistral": Family("MistralForCausalLM", _LLAMA, True),
    "mixtral": Family("MixtralForCausalLM", {**_LLAMA, "num_experts_per_tok": 2, "num_local_experts": 3}, True),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA, True),
    "qwen3": Family("Qwen3ForCausalLM", _LLAMA, True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**_LLAMA, "num_experts_per_tok": 2, "num_experts": 3, "moe_intermediate_size": 12}, True
    ),
    "gemma": Family("GemmaForCausalLM", _LLAMA, True),
    "gemma2": Family("Gemma2ForCausalLM", _LLAMA, True),
    "phi": Family("PhiForCausalLM", {**_TEXT, **_ENDS, "max_position_embeddings": 32, "partial_rotary_factor": 0.5}),
    "t5": Family("T5ForConditionalGeneration", _T5),
    "bart": Family("BartForConditionalGeneration", _BART),
    "marian": Family("MarianMTModel", {**_BART, "decoder_vocab_size": 40}),
    "whisper": Family("WhisperForConditionalGeneration", _WHISPER),
    "wav2vec2": Family("Wav2Vec2ForCTC", _SOUND),
    "vit": Family("ViTForImageClassification", _IMAGES),
    "deit": Family("DeiTForImageClassification", _IMAGES),
    "dinov2": Family("Dinov2ForImageClassification", _IMAGES),
    "swin": Family("SwinForImageClassification", _SWIN),
    "convnext": Family("ConvNextForImageClassification", _CONVNEXT),
    "resnet": Family("ResNetForImageClassification", _RESNET),
    "clip": Family("CLIPModel", {**_PAIR, "projection_dim": 12}),
    "siglip": Family("SiglipModel", _PAIR),
    "esm": Family("EsmForMaskedLM", {**_BERT, "pad_token_id": 1, "mask_token_id": 39, "position_embedding_type": "rotary"}),
}


def save_family(name: str, seed: int, folder: Path) -> None:
    """Save a model with random weights, norms included."""
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, FAMILIES[name].model)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**FAMILIES[name].config))
    for key, parameter in model.named_parameters():
        if key not in (model._keys_to_ignore_on_save or ()):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def load_family(name: str, folder: Path) -> Any:
    """Load a model. Every tensor must be there, and no other."""
    model_class = getattr(pytest.importorskip("transformers"), FAMILIES[name].model)
    model, found = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()
