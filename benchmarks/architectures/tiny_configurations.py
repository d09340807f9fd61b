"""Tiny configurations of `transformers`, made from the default ones by the names of their entries."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 64

# The first pattern that matches the whole name of an entry decides; each holds for integers alone.
_NUMBERS: list[tuple[str, int]] = [
    (r"rotary_dim", 4),
    (r".*vocab_size.*|num_embeddings|codebook_size|vocab_size_per_layer_input", VOCABULARY),
    (r".*(num_key_value_heads|num_kv_heads|n_head_kv|kv_heads|key_value_heads)", 2),
    (r".*(attention_heads|num_heads|n_heads?|nhead|num_v_heads|n_groups_heads)|num_attention_head", 4),
    (r"(mamba_|linear_num_(key|value)_)heads|linear_num_(key|value)_heads|mamba_n_heads", 4),
    (r".*(first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_hash_layers)", 1),
    (r"decoder_sparse_step|moe_layer_freq|moe_layer_interval|expert_layer_period|encoder_sparse_step|.*_sparse_step", 1),
    (r".*(attn_layer_period|attn_layer_offset)", 1),
    (r"expert_layer_offset|num_feat_extract_layers|num_adapter_layers|num_mtp_layers|num_nextn_predict_layers|mtp_.*", 0),
    (r".*(layers|n_layer|depth|num_blocks|num_stacks|num_layer|n_blocks)", 2),
    (r"n_group|topk_group|num_expert_group|router_num_group", 1),
    (r".*(experts_per_tok|experts_per_token|num_selected_experts|moe_top_?k|moe_k|top_k_experts|moe_topk)", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r".*(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)", 4),
    (r".*(head_dim|d_kv|attention_head_size|attention_key_size|d_head|kv_channels|head_size)", 8),
    (r".*(lora_rank|index_n_heads|index_topk)|.*_rank", 8),
    (r".*(max_.*position.*|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length|block_size)", VOCABULARY),
    (r".*(intermediate_size|ffn_dim|d_ff|hidden_dim|mlp_dim|n_inner|ffn_size|feedforward.*|ffn_hidden_size|inner_dim)", 40),
    (r".*(feed_forward_dim|linear_units|dim_feedforward|intermediate_dim|shared_expert.*size|expert_ffn.*)", 40),
    (r".*(state_size|mamba_d_state|d_state|ssm_state_size|time_step_rank|chunk_size)", 8),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_channels|_dim|^dim|dim|width|_size_per_head)", 32),
    (r".*(image_size|img_size|input_size|resolution)", 32),
    (r".*patch_size", 8),
    (r".*(num_mel_bins|num_mels|feature_size|input_feat_per_channel|n_mels)", 16),
    (r".*max_source_positions", 32),
    (r".*(num_queries|num_query_tokens|num_latents|num_memory_tokens)", 10),
    (r".*num_(conv_pos_embedding_groups|groups)", 2),
    (r".*num_conv_pos_embeddings", 4),
    (r".*num_frames", 4),
    (r"num_labels", 3),
]  # fmt: skip
_LISTS: list[tuple[str, Any]] = [
    (r".*(depths|layers|num_blocks|layer_depths|blocks_per_stage|num_layers_per_stage)", lambda n: [1] * (n - 1) + [2]),
    (r".*(num_attention_heads|num_heads|n_heads|attention_heads|num_attention_heads_per_stage)", lambda n: [2] * n),
    (
        r".*(hidden_sizes|embed_dims?|dims|channels|conv_dim|hidden_dims|widths|tdnn_dim)",
        lambda n: [16] * n,
    ),
]


def shrink(config_class: type, given: dict[str, Any] | None = None) -> Any:
    """A tiny configuration of a class, parts included; what is given goes before what a name says."""
    given = given or {}
    return config_class(**(_shrink_entries(config_class(), given)))


def _shrink_entries(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    entries: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in given:
            continue
        if isinstance(value, PreTrainedConfig):
            entries[name] = _shrink_entries(value, {}) | {"model_type": value.model_type}
        elif (small := _shrink_entry(name, value)) is not None and small != value:
            entries[name] = small
    for name, value in given.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, dict) and "model_type" not in value:
            value = _shrink_entries(part, value) | {"model_type": part.model_type}
        entries[name] = value
    return _agree(config, entries)


def _shrink_entry(name: str, value: Any) -> Any:
    if re.fullmatch(r".*(token_id|token_index|_token_ids?)", name):
        return _shrink_token(name, value)
    if name == "vocab_size":
        return VOCABULARY
    if isinstance(value, int) and not isinstance(value, bool):
        return next((small for pattern, small in _NUMBERS if re.fullmatch(pattern, name)), None) or None
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return next((type(value)(make(len(value))) for pattern, make in _LISTS if re.fullmatch(pattern, name)), None)
    return None


def _shrink_token(name: str, value: Any) -> Any:
    """Special tokens below the vocabulary: padding, beginning and end first, then from its upper end down."""
    if isinstance(value, list):
        return [2]
    if not isinstance(value, int) or value < 0:
        return None
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return known.get(name, value if value < 3 else VOCABULARY - 1 - sum(map(ord, name)) % 16)


def _agree(config: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """Lists of a kind per layer have an element for each layer, and every kind occurs; compressed keys have all heads."""
    if "kv_lora_rank" in vars(config) and "num_key_value_heads" in vars(config):
        entries["num_key_value_heads"] = entries["num_attention_heads"]
    kinds = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and value and name not in entries and all(isinstance(v, str) for v in value)
        and re.fullmatch(r".*(layer_types|block_types|layers_block_type|layer_type|mlp_layer_types|_layer_types)", name)
    }  # fmt: skip
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if kinds and name in entries:
            entries[name] = max(2, *(len(set(value)) for value in kinds.values()))
            for kind, value in kinds.items():
                seen = list(dict.fromkeys(value))
                entries[kind] = [seen[i % len(seen)] for i in range(entries[name])]
            break
    return entries


_BACKBONE = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 12, 16, 16], "depths": [1, 1, 1, 1]}
_BACKBONE |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _BACKBONE}
_HEAD = {"head_dim": 8}
_WINDOWS = {"patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
_SAM = {
    "vision_config": {"output_channels": 32, "image_size": 32, "patch_size": 8, "global_attn_indexes": [1], "window_size": 2}
    | {"num_pos_feats": 16, "mlp_dim": 40},
    "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4, "mask_input_channels": 8},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}

GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bart": {"max_position_embeddings": 64},
    "conditional_detr": _DETR,
    "convnext": {"patch_size": 2},
    "convnextv2": {"patch_size": 2},
    "dab-detr": {**_DETR, "query_dim": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": _DETR,
    "detr": _DETR,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1, 1]},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl_text": _HEAD,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "maskformer": {"fpn_feature_size": 32},
    "ministral": _HEAD,
    "mobilebert": {"hidden_size": 32, "embedding_size": 32, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen4_exp_text": _HEAD,
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "num_hidden_layers": 2},
    "sam": _SAM,
    "sam_hq": _SAM,
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "donut-swin": _WINDOWS,
    "maskformer-swin": _WINDOWS,
    "squeezebert": {"embedding_size": 32},
    "table-transformer": _DETR,
    "zaya": {"num_experts_per_tok": 1},
}
"""What the name of an entry does not tell, by type of model."""
_LEARNED = {"learned positions": {"position_embedding_type": "learned"}}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "conditional_detr": _LEARNED,
    "deformable_detr": _LEARNED,
    "detr": _LEARNED,
}
"""More rows of a type of model, each with entries of its configuration."""

LEFT_OUT: set[str] = {"dinat", "layoutlmv2", "timm_backbone", "timm_wrapper", "omdet-turbo"}
"""They need another package, or are models of timm."""
