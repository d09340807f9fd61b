"""The real architectures of the coverage table: how to make each, what to feed it, and groups counted by hand.

Nothing is downloaded: weights are random, as the constructors make them. Inputs are small where the architecture allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        library: where it comes from.
        name: its name there.
        make: the model and its inputs.
        counted: the number of groups a person derives from the architecture, if one did.
        unverified: why its weights are not made: then it is traced on the meta device.
    """

    library: str
    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    counted: int | None = None
    unverified: str = ""


def declare_torchvision_operators() -> None:
    """The registry's torchvision is built for CUDA: on CPU torch two of its operators must be declared first."""
    if torch.cuda.is_available() or _LIBRARY:
        return
    _LIBRARY.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _LIBRARY[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARY: list[torch.library.Library] = []


# -------------------------------------------------------------------------------------------------------- torchvision

# A group is a hidden width that no shortcut ties to another; an attention has heads, query-key units and value units.
_TORCHVISION_COUNTED = {
    "alexnet": 5 + 2,  # convolutions, fully connected
    "vgg16": 13 + 2,
    "resnet18": 1 + 3 + 8,  # stem with stage 1, stages 2-4, inside of 8 blocks
    "resnet50": 1 + 4 + 16 * 2,
    "densenet121": 1 + 58 * 2 + 3,  # stem, two a dense layer, transitions
    "mobilenet_v2": 1 + 16 + 7 + 1,  # stem (first block's depthwise too), expansions, residual widths, last
    "convnext_tiny": 4 + 18,  # stages, inside of 18 blocks
    "vit_b_16": 1 + 12 * 4,  # stream; heads, query-key units, value units and the inside of the MLP in each block
    "swin_t": 4 + 12 * 4,  # four streams, twelve blocks of the same four
}

_TORCHVISION_SIZES = {"inception_v3": 96, "googlenet": 64, "alexnet": 64, "maxvit_t": 224}
_TORCHVISION_LARGE = {
    "regnet_y_128gf": "645M parameters; the other regnets are the same code",
    "vit_h_14": "632M parameters; vit_l_16 is the same code",
}


def torchvision_architectures() -> Iterator[Architecture]:
    """Every classification model."""
    declare_torchvision_operators()
    from torchvision import models

    def make(name: str) -> tuple[nn.Module, Tensor]:
        options: dict[str, Any] = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
        size = _TORCHVISION_SIZES.get(name, 32)
        if name.startswith("vit"):
            size = 2 * int(name.rpartition("_")[2])
            options["image_size"] = size
        return models.get_model(name, weights=None, **options), torch.rand(1, 3, size, size)

    for name in models.list_models(module=models):
        yield Architecture(
            "torchvision",
            name,
            lambda name=name: make(name),
            _TORCHVISION_COUNTED.get(name),
            _TORCHVISION_LARGE.get(name, ""),
        )


# --------------------------------------------------------------------------------------------------------------- timm

_TIMM = (
    "beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "caformer_s18", "coat_lite_tiny", "coatnet_0_rw_224",
    "convit_tiny", "convmixer_768_32", "convnextv2_atto", "crossvit_9_240", "cspdarknet53", "davit_tiny",
    "deit3_small_patch16_224", "dla34", "dpn68", "eca_nfnet_l0", "edgenext_xx_small", "efficientformer_l1",
    "efficientformerv2_s0", "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_dw", "eva02_tiny_patch14_224",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_100", "gmlp_s16_224", "halonet26t", "hiera_tiny_224",
    "hrnet_w18_small", "inception_next_atto", "inception_resnet_v2", "lambda_resnet26t", "levit_128s",
    "maxxvit_rmlp_nano_rw_256", "mixer_s16_224", "mobilenetv4_conv_small", "mobilevit_xxs", "mvitv2_tiny", "nest_tiny",
    "nf_resnet26", "pit_ti_224", "poolformer_s12", "pvt_v2_b0", "regnetz_b16", "repvgg_a0", "repvit_m1",
    "res2net50_26w_4s", "resmlp_12_224", "resnest14d", "resnetv2_50", "rexnet_100", "selecsls42b", "sequencer2d_s",
    "skresnet18", "starnet_s1", "swinv2_tiny_window8_256", "tf_efficientnet_lite0", "tinynet_e", "tnt_s_patch16_224",
    "twins_pcpvt_small", "visformer_tiny", "vit_small_patch14_dinov2", "vit_base_patch16_siglip_224",
    "vit_relpos_small_patch16_224", "volo_d1_224", "xception41", "xcit_nano_12_p16_224",
)  # fmt: skip

_TIMM_COUNTED = {
    "beit_base_patch16_224": 1 + 12 * 4,
    "deit3_small_patch16_224": 1 + 12 * 4,
    "mixer_s16_224": 1 + 8 * 2,  # stream; inside of the token MLP and of the channel MLP in each block
    "convmixer_768_32": 1 + 32,  # every pointwise convolution makes a new width, every depthwise one keeps it
}


def timm_architectures() -> Iterator[Architecture]:
    """One or two of each family."""
    declare_torchvision_operators()
    import timm

    def make(name: str) -> tuple[nn.Module, Tensor]:
        model = timm.create_model(name, pretrained=False)
        _, height, width = model.pretrained_cfg["input_size"]
        small = name in _TIMM_SMALL
        return model, torch.rand(1, 3, *((64, 64) if small else (height, width)))

    for name in _TIMM:
        yield Architecture("timm", name, lambda name=name: make(name), _TIMM_COUNTED.get(name))


_TIMM_SMALL = {
    "convmixer_768_32", "convnextv2_atto", "cspdarknet53", "dla34", "dpn68", "eca_nfnet_l0", "ese_vovnet19b_dw",
    "ghostnet_100", "hrnet_w18_small", "mobilenetv4_conv_small", "nf_resnet26", "poolformer_s12", "regnetz_b16",
    "repvgg_a0", "repvit_m1", "res2net50_26w_4s", "resnest14d", "resnetv2_50", "rexnet_100", "skresnet18", "starnet_s1",
    "tf_efficientnet_lite0", "tinynet_e",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- transformers


class Logits(nn.Module):
    """A Hugging Face model as a function of tensors: without a cache, only its main result."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits if there are any, else the last hidden state."""
        cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        result = self.model(**inputs, **cache)
        return result.logits if hasattr(result, "logits") else result[0]


_TEXT = {"vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40}
_TEXT |= {"max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
_IMAGE |= {"image_size": 16, "patch_size": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BOTH = {"vocab_size": 32, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, **_IDS}
_BOTH |= {"decoder_ffn_dim": 40, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "decoder_start_token_id": 1}


def _ids(length: int = 6) -> dict[str, Tensor]:
    return {"input_ids": 3 + torch.arange(2 * length).view(2, length) % 29}


def _pixels(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(2, 3, size, size)}


def _pair() -> dict[str, Tensor]:
    return {**_ids(), "decoder_input_ids": 3 + torch.arange(8).view(2, 4)}


def _sound() -> dict[str, Tensor]:
    return {"input_features": torch.rand(2, 8, 20), "decoder_input_ids": 3 + torch.arange(8).view(2, 4)}


def _towers() -> dict[str, Any]:
    return {"text_config": {**_TEXT, "projection_dim": 10}, "vision_config": {**_IMAGE, "projection_dim": 10}}


# name: model class, configuration, inputs, groups counted by hand. In a block: heads (with grouped queries also the query
# heads of each), query-key units (unless rotary positions pin them), value units, the inside of the MLP. Then the stream.
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]], int | None]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": 32, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 6, **_IDS},
        _ids,
        1 + 2 * 4,
    ),
    "Llama": ("LlamaForCausalLM", _GROUPED, _ids, 1 + 2 * 4),
    "Mistral": ("MistralForCausalLM", _GROUPED, _ids, 1 + 2 * 4),
    "Mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}, _ids, None),
    "Qwen2": ("Qwen2ForCausalLM", _GROUPED, _ids, 1 + 2 * 4),
    "Qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}, _ids, 1 + 2 * 4),
    "Gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 8}, _ids, 1 + 2 * 4),
    "Gemma 2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8}, _ids, 1 + 2 * 4),
    # half of each query-key unit is rotary; the other half is free
    "Phi": ("PhiForCausalLM", _GROUPED, _ids, 1 + 2 * 5),
    "Phi-3": ("Phi3ForCausalLM", _GROUPED, _ids, 1 + 2 * 4),
    "OPT": (
        "OPTForCausalLM",
        {"vocab_size": 32, "hidden_size": 48, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
        | {"max_position_embeddings": 16, "word_embed_proj_dim": 48, **_IDS},
        _ids,
        1 + 2 * 4,
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", _TEXT, _ids, None),
    "Falcon": (
        "FalconForCausalLM",
        {"vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, **_IDS},
        _ids,
        None,
    ),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": 32, "hidden_size": 48, "n_layer": 2, "n_head": 8, **_IDS}, _ids, None),
    "BERT": ("BertForMaskedLM", _TEXT, _ids, 1 + 2 * 4),  # the head's transform ends in the stream's tied embedding
    "RoBERTa": ("RobertaForMaskedLM", _TEXT, _ids, None),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        {"vocab_size": 32, "dim": 48, "hidden_dim": 40, "n_layers": 2, "n_heads": 6, "max_position_embeddings": 16},
        _ids,
        None,
    ),
    "ALBERT": ("AlbertForMaskedLM", {**_TEXT, "embedding_size": 10}, _ids, None),
    "ELECTRA": ("ElectraForMaskedLM", {**_TEXT, "embedding_size": 10}, _ids, None),
    "DeBERTa v2": (
        "DebertaV2ForMaskedLM",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _ids,
        None,
    ),
    # Encoder and decoder share one embedding, so one stream; a block of the decoder has two attentions. Units of 6
    # attentions, 4 MLPs; one table of positions for all blocks ties the heads of the encoder, and those of the decoder's
    # self-attentions, but not those of its 2 cross-attentions.
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6, **_IDS},
        _pair,
        1 + 6 * 2 + 4 + (1 + 1 + 2),
    ),
    "BART": ("BartForConditionalGeneration", {**_BOTH, "max_position_embeddings": 16}, _pair, 1 + 6 * 3 + 4),
    "ViT": ("ViTForImageClassification", _IMAGE, _pixels, 1 + 2 * 4),
    "DeiT": ("DeiTForImageClassification", _IMAGE, _pixels, 1 + 2 * 4),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
        _pixels,
        2 + 4 * 4,
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 12], "depths": [2, 2], "num_stages": 2},
        lambda: _pixels(32),
        2 + 4,
    ),
    "CLIP": ("CLIPModel", {**_towers(), "projection_dim": 10}, lambda: {**_ids(), **_pixels()}, 2 + 4 * 4 + 1),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**_BOTH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
        _sound,
        3 + 6 * 3 + 4,  # first convolution, two streams
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {"vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40}
        | {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        lambda: {"input_values": torch.rand(2, 400)},
        None,
    ),
    "Mamba": (
        "MambaForCausalLM",
        {"vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4},
        _ids,
        None,
    ),
}


def transformers_architectures() -> Iterator[Architecture]:
    """Families of `transformers`, from tiny configurations."""
    declare_torchvision_operators()
    import transformers

    def make(class_name: str, options: dict[str, Any], inputs: Callable[[], Any]) -> tuple[nn.Module, Any]:
        model_class = getattr(transformers, class_name)
        return Logits(model_class(model_class.config_class(**options))), inputs()

    for name, (class_name, options, inputs, counted) in _TRANSFORMERS.items():
        yield Architecture("transformers", name, lambda a=(class_name, options, inputs): make(*a), counted)


LIBRARIES: dict[str, Callable[[], Iterator[Architecture]]] = {
    "torchvision": torchvision_architectures,
    "timm": timm_architectures,
    "transformers": transformers_architectures,
}
