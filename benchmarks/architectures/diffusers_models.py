"""The models of diffusers: U-Nets, transformers and autoencoders, each of a tiny configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import Architecture, Example, NotMade
from onebasin.cli.torchvision_operators import declare_missing_operators

_TEXT = 24
"""Width of what stands for a text."""
Parts = dict[str, Callable[[int, int], Any]]


class Sample(nn.Module):
    """A model of diffusers as a function of tensors."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None = None):
        super().__init__()
        self.model, self.options = model, options or {}

    def forward(self, **inputs: Any) -> Tensor:
        """Its first result."""
        return self.model(**inputs, **self.options, return_dict=False)[0]


def _image(channels: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.randn(batch, channels, length, length)


def _video(channels: int, frames: int = 3) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.randn(batch, channels, frames, length, length)


def _steps(batch: int, _: int) -> Tensor:
    return torch.randint(1, 900, (batch,))


def _text(batch: int, _: int) -> Tensor:
    return torch.randn(batch, 5, _TEXT)


def _vector(width: int = _TEXT) -> Callable[[int, int], Tensor]:
    return lambda batch, _: torch.randn(batch, width)


def _mask(batch: int, _: int) -> Tensor:
    return torch.ones(batch, 5)


def _places(axes: int, count: int | None = None) -> Callable[[int, int], Tensor]:
    def make(_: int, length: int) -> Tensor:
        number = count or length
        return torch.arange(number).float()[:, None].expand(number, axes).contiguous()

    return make


_CONDITIONED: Parts = {"timestep": _steps, "encoder_hidden_states": _text}
_DENOISED: Parts = {"sample": _image(4), "timestep": _steps, "encoder_hidden_states": _text}
_LATENT: Parts = {"hidden_states": _image(4), **_CONDITIONED}
_CLIP: Parts = {"hidden_states": _video(4), **_CONDITIONED}
_PIXELS: Parts = {"sample": _image(3)}
_FRAMES: Parts = {"sample": _video(3, 5)}
_PACKED: Parts = {
    "hidden_states": lambda b, n: torch.randn(b, n, 8),
    "encoder_hidden_states": _text,
    "img_ids": _places(3),
    "txt_ids": _places(3, 5),
    "timestep": lambda b, _: torch.rand(b),
}

_UNET = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_CROSS = {**_UNET, "cross_attention_dim": _TEXT, "attention_head_dim": 4}
_CROSS |= {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
_CROSS_3D = {**_UNET, "cross_attention_dim": _TEXT, "attention_head_dim": 4}
_CROSS_3D |= {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
_ENCODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_ROTARY = {**_HEADS, "attention_head_dim": 12, "axes_dims_rope": (4, 4, 4)}
_WAN = {
    **_HEADS,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": _TEXT,
    "freq_dim": 16,
    "ffn_dim": 40,
}

# The class, and what tells rows of one class apart: configuration, inputs, length, fixed arguments of the call if any
_MOTION = {**_UNET, "cross_attention_dim": _TEXT, "num_attention_heads": 4, "motion_num_attention_heads": 4}
_MOTION |= {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion")}
_MOTION |= {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")}
_MOVING: Parts = {"sample": _video(4), "timestep": _steps}
_MOVING |= {"encoder_hidden_states": lambda batch, _: torch.randn(3 * batch, 5, _TEXT)}

_MODELS: dict[str, tuple[Any, ...]] = {
    "UNet2DModel": (
        {**_UNET, "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": _image(3), "timestep": _steps},
        16,
    ),
    "UNet2DModel, scale and shift": (
        {**_UNET, "attention_head_dim": 4, "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"), "resnet_time_scale_shift": "scale_shift"},
        {"sample": _image(3), "timestep": _steps},
        16,
    ),
    "UNet2DConditionModel": (_CROSS, _DENOISED, 16),
    "UNet2DConditionModel, linear projection": (
        {**_CROSS, "use_linear_projection": True, "transformer_layers_per_block": 2},
        _DENOISED,
        16,
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 64),
            "norm_num_groups": 8,
            "sample_size": 64,
            "in_channels": 3,
            "out_channels": 3,
            "extra_in_channels": 64,
        }
        | {
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
        },
        {"sample": lambda b, n: torch.randn(b, 3, n), "timestep": _steps},
        32,
    ),
    "UNet3DConditionModel": (_CROSS_3D, {"sample": _video(4), **_CONDITIONED}, 8),
    "UNetMotionModel": (_MOTION, _MOVING, 8),
    "UNetMotionModel, as many frames as positions": ({**_MOTION, "motion_max_seq_length": 3}, _MOVING, 8),
    "UNetSpatioTemporalConditionModel": (
        # Its norms have 32 groups: of two channels at least, where the model itself has ten.
        {"block_out_channels": (64, 128), "layers_per_block": 1, "cross_attention_dim": _TEXT, "num_attention_heads": 4}
        | {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "addition_time_embed_dim": 8}
        | {
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "projection_class_embeddings_input_dim": 24,
        },
        {"sample": lambda b, n: torch.randn(b, 3, 8, n, n), "timestep": _steps}
        | {"encoder_hidden_states": lambda b, _: torch.randn(b, 1, _TEXT), "added_time_ids": lambda b, _: torch.rand(b, 3)},
        8,
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 4,
            "layers_per_block": 2,
            "block_out_channels": (16, 32, 32, 32),
        }
        | {"cross_attention_dim": 8, "encoder_hid_dim": _TEXT},
        {**_DENOISED, "encoder_attention_mask": _mask},
        8,
    ),
    "AudioLDM2UNet2DConditionModel": (
        {**_CROSS, "cross_attention_dim": (_TEXT, _TEXT)},
        _DENOISED,
        16,
    ),
    "StableCascadeUNet": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 16,
            "block_out_channels": (16, 16),
            "num_attention_heads": (4, 4),
        }
        | {"down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": _TEXT},
        {
            "sample": _image(4),
            "timestep_ratio": lambda b, _: torch.rand(b),
            "clip_text_pooled": lambda b, _: torch.randn(b, 1, _TEXT),
        },
        8,
    ),
    "ControlNetModel": (
        {k: v for k, v in _CROSS.items() if k != "up_block_types"} | {"conditioning_embedding_out_channels": (8, 16)},
        {**_DENOISED, "controlnet_cond": lambda b, n: torch.randn(b, 3, 2 * n, 2 * n)},
        16,
    ),
    "AutoencoderKL": ({**_UNET, **_ENCODER}, _PIXELS, 16),
    "AsymmetricAutoencoderKL": (
        {**_ENCODER, "down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32), "norm_num_groups": 8},
        _PIXELS,
        16,
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        _PIXELS,
        16,
    ),
    "AutoencoderDC": (
        {"latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
        }
        | {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,))}
        | {"decoder_qkv_multiscales": ((), (5,))},
        _PIXELS,
        16,
    ),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 32), "layers_per_block": 1, "down_block_types": ("DownEncoderBlock2D",) * 2},
        _PIXELS,
        16,
    ),
    "AutoencoderKLWan": (
        {"base_dim": 6, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        _FRAMES,
        16,
    ),
    "AutoencoderKLQwenImage": (
        {"base_dim": 6, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [False]},
        _FRAMES,
        16,
    ),
    "AutoencoderKLCogVideoX": (
        {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
        | {
            "down_block_types": ("CogVideoXDownBlock3D",) * 2,
            "up_block_types": ("CogVideoXUpBlock3D",) * 2,
            "temporal_compression_ratio": 2,
        },
        _FRAMES,
        16,
    ),
    "AutoencoderKLHunyuanVideo": (
        {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4},
        _FRAMES,
        16,
    ),
    "AutoencoderKLMagvit": (
        {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
        | {"down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"]}
        | {"up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"]},
        _FRAMES,
        16,
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        {"sample": lambda b, n: torch.randn(b, 2, n)},
        32,
    ),
    "VQModel": ({**_UNET, **_ENCODER, "num_vq_embeddings": 12}, _PIXELS, 16),
    "DiTTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "num_embeds_ada_norm": 10},
        {"hidden_states": _image(4), "timestep": _steps, "class_labels": lambda b, _: torch.randint(0, 10, (b,))},
        8,
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": _TEXT},
        _LATENT,
        8,
        {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "Transformer2DModel": (
        {**_HEADS, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": _TEXT},
        {"hidden_states": _image(8), "encoder_hidden_states": _text},
        8,
    ),
    "TransformerTemporalModel": (
        {**_HEADS, "in_channels": 8, "norm_num_groups": 4},
        {"hidden_states": lambda b, n: torch.randn(3 * b, 8, n, n)},
        8,
        {"num_frames": 3},
    ),
    "SD3Transformer2DModel": (
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": _TEXT,
            "caption_projection_dim": 32,
        }
        | {"pooled_projection_dim": _TEXT, "pos_embed_max_size": 12},
        {**_LATENT, "pooled_projections": _vector()},
        8,
    ),
    "SD3Transformer2DModel, query norm": (
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": _TEXT,
            "caption_projection_dim": 32,
        }
        | {"pooled_projection_dim": _TEXT, "pos_embed_max_size": 12, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        {**_LATENT, "pooled_projections": _vector()},
        8,
    ),
    "FluxTransformer2DModel": (
        {**_ROTARY, "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": _TEXT, "pooled_projection_dim": _TEXT},
        {**_PACKED, "pooled_projections": _vector()},
        9,
    ),
    "Flux2Transformer2DModel": (
        {
            **_ROTARY,
            "in_channels": 8,
            "num_single_layers": 2,
            "joint_attention_dim": _TEXT,
            "timestep_guidance_channels": 16,
        },
        {**_PACKED, "guidance": lambda b, _: torch.rand(b)},
        9,
    ),
    "ChromaTransformer2DModel": (
        {**_ROTARY, "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": _TEXT, "approximator_num_channels": 8}
        | {"approximator_hidden_dim": 16, "approximator_layers": 1},
        _PACKED,
        9,
    ),
    "BriaTransformer2DModel": (
        {**_ROTARY, "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": _TEXT},
        _PACKED,
        9,
    ),
    "LongCatImageTransformer2DModel": (
        {**_ROTARY, "in_channels": 8, "num_single_layers": 2, "joint_attention_dim": _TEXT, "pooled_projection_dim": _TEXT},
        _PACKED,
        9,
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
        }
        | {"joint_attention_dim": _TEXT, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        _LATENT,
        8,
    ),
    "SanaTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8}
        | {"cross_attention_dim": 32, "caption_channels": _TEXT, "sample_size": 8},
        _LATENT,
        8,
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
        }
        | {
            "num_kv_heads": 2,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": _TEXT,
        },
        {**_LATENT, "encoder_attention_mask": lambda b, _: torch.ones(b, 5, dtype=torch.bool)},
        8,
    ),
    "CogVideoXTransformer3DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": _TEXT,
            "sample_width": 8,
            "sample_height": 8,
        }
        | {"sample_frames": 9, "max_text_seq_length": 5},
        {**_CONDITIONED, "hidden_states": lambda b, n: torch.randn(b, 3, 4, n, n)},
        8,
    ),
    "CogView4Transformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": _TEXT, "time_embed_dim": 16, "condition_dim": 8}
        | {"pos_embed_max_size": 16, "sample_size": 8, "rope_axes_dim": (8, 8)},
        {**_LATENT, "original_size": _vector(2), "target_size": _vector(2), "crop_coords": _vector(2)},
        8,
    ),
    "CogView3PlusTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": _TEXT, "time_embed_dim": 16, "condition_dim": 8}
        | {"pos_embed_max_size": 16, "sample_size": 8},
        {**_LATENT, "original_size": _vector(2), "target_size": _vector(2), "crop_coords": _vector(2)},
        8,
    ),
    "LatteTransformer3DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 32,
            "video_length": 3,
        }
        | {"caption_channels": _TEXT, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000},
        _CLIP,
        8,
    ),
    "LTXVideoTransformer3DModel": (
        {**_HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": _TEXT},
        {"hidden_states": lambda b, _: torch.randn(b, 12, 8), **_CONDITIONED, "encoder_attention_mask": _mask},
        1,
        {"num_frames": 3, "height": 2, "width": 2},
    ),
    "MochiTransformer3DModel": (
        {
            **_HEADS,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": _TEXT,
            "time_embed_dim": 16,
            "max_sequence_length": 5,
        },
        {**_CLIP, "encoder_attention_mask": lambda b, _: torch.ones(b, 5, dtype=torch.bool)},
        8,
    ),
    "WanTransformer3DModel": (_WAN, _CLIP, 8),
    "SkyReelsV2Transformer3DModel": (_WAN, _CLIP, 8),
    "HunyuanVideoTransformer3DModel": (
        {
            **_HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
        }
        | {"text_embed_dim": _TEXT, "pooled_projection_dim": _TEXT, "rope_axes_dim": (4, 4, 4)},
        {**_CLIP, "encoder_attention_mask": _mask, "pooled_projections": _vector(), "guidance": lambda b, _: torch.rand(b)},
        8,
    ),
    "QwenImageTransformer2DModel": (
        {**_ROTARY, "in_channels": 8, "out_channels": 2, "joint_attention_dim": _TEXT},
        {"hidden_states": lambda b, _: torch.randn(b, 12, 8), **_CONDITIONED, "encoder_hidden_states_mask": _mask},
        1,
        {"img_shapes": [(1, 3, 4)]},
    ),
    "PriorTransformer": (
        {**_HEADS, "embedding_dim": _TEXT, "num_embeddings": 5},
        {"hidden_states": _vector(), **_CONDITIONED, "proj_embedding": _vector()},
        1,
    ),
    "StableAudioDiTModel": (
        {
            **_HEADS,
            "in_channels": 6,
            "out_channels": 6,
            "sample_size": 16,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 16,
        }
        | {"time_proj_dim": 8, "global_states_input_dim": _TEXT, "cross_attention_input_dim": _TEXT},
        {
            "hidden_states": lambda b, n: torch.randn(b, 6, n),
            "timestep": lambda b, _: torch.rand(b),
            "encoder_hidden_states": _text,
        }
        | {"global_hidden_states": lambda b, _: torch.randn(b, 1, _TEXT)},
        9,
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": _TEXT, "hidden_size": 32, "num_heads": 4, "depth": 2, "axes_dim": (4, 4)},
        _LATENT,
        8,
    ),
    "CosmosTransformer3DModel": (
        {
            **_HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": _TEXT,
            "adaln_lora_dim": 6,
        }
        | {"max_size": (4, 16, 16), "concat_padding_mask": False},
        _CLIP,
        8,
    ),
    "SanaVideoTransformer3DModel": (
        {
            **_HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 12,
        }
        | {"cross_attention_dim": 48, "caption_channels": _TEXT, "sample_size": 8},
        _CLIP,
        8,
    ),
    "AllegroTransformer3DModel": (
        {
            **_HEADS,
            "attention_head_dim": 12,
            "cross_attention_dim": 48,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 3,
        }
        | {"caption_channels": _TEXT},
        {
            **_CLIP,
            "attention_mask": lambda b, n: torch.ones(b, 3, n, n),
            "encoder_attention_mask": lambda b, _: torch.ones(b, 1, 5),
        },
        8,
    ),
}


def diffusers_architectures() -> Iterator[Architecture]:
    """Every one of them."""
    declare_missing_operators()
    for name in _MODELS:
        kind = "U-Net" if "UNet" in name else ""
        yield Architecture("diffusers", name, lambda name=name: _make(name), kind=kind)


def _make(name: str) -> Example:
    import diffusers

    options, parts, length, *fixed = _MODELS[name]
    class_name = name.partition(",")[0]

    def inputs(batch: int, length: int) -> dict[str, Any]:
        return {key: make(batch, length) for key, make in parts.items()}

    try:
        model = Sample(getattr(diffusers, class_name)(**options).eval(), *fixed)
        with torch.no_grad():
            model(**inputs(2, length))
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    return Example(model, inputs, length, (length * 3 // 2,))
