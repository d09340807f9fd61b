"""Models of diffusers: built from plain values of a configuration, called as the other parts of a pipeline call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.checkpoints.example_inputs import draw

CLASS_ENTRY = "_class_name"
_NUM_TOKENS = 8
_NUM_PATCHES = 9


class PipelineModel(nn.Module):
    """The models of a pipeline as one network, which is called with the inputs of some of them.

    Args:
        parts: the models by the names of their parts.
    """

    def __init__(self, parts: Mapping[str, nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, **inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run each part that is named, with its inputs by their names.

        Returns:
            The outputs by the names of the parts.
        """
        return {name: self.get_submodule(name)(**values) for name, values in inputs.items()}


def find_class(library: Any, name: Any) -> Any:
    """The class of a model that diffusers has and that is known here.

    Args:
        library: the package.
        name: of the class, as a configuration gives it.

    Raises:
        ValueError: for a class that is not in the list.
    """
    if not isinstance(name, str) or name not in _INPUTS:
        raise ValueError(f"its class {str(name)[:60]!r} is not one of {', '.join(_INPUTS)}")
    kind = getattr(library, name)
    return _show_latents(kind) if name in _LATENTS else kind


def make_inputs(model: Any) -> dict[str, Any] | None:
    """What to call a model with, by name; None if its configuration asks for inputs that are not known."""
    return _INPUTS[type(model).__name__](model)


def fill_in(content: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """A configuration with the defaults of entries that are not set, and without those that the class does not take."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {each.name: content.get(each.name, each.default) for each in parameters if each.default is not each.empty}


def _show_latents(kind: Any) -> Any:
    """The class of an autoencoder with a call that encodes and decodes.

    Another network of the pipeline reads and writes the latents between the two: they are inputs and outputs, not units.
    """

    def forward(self: Any, sample: Tensor, latents: Tensor) -> tuple[Any, ...]:
        decoded = self.decode(latents, return_dict=False)[0]
        codes = (self.quantize.embedding.weight,) if hasattr(self, "quantize") else ()
        return (_LATENTS[kind.__name__](self.encode(sample)), decoded, *codes)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _draw_image(channels: int, side: int) -> Tensor:
    return draw(1, channels, side, side)


def _find_side(widths: Any) -> int:
    """Of an image of which two pixels are left at the lowest resolution."""
    return 2 ** len(widths)


def _draw_steps() -> Tensor:
    return torch.rand(1)


def _make_unet_inputs(model: Any) -> dict[str, Any] | None:
    config = model.config
    found: dict[str, Any] = {"sample": _draw_image(config.in_channels, _find_side(config.block_out_channels))}
    found["timestep"] = _draw_steps()
    if config.get("time_cond_proj_dim"):
        found["timestep_cond"] = draw(1, config.time_cond_proj_dim)
    return _add_labels(found, config)


def _make_conditioned_inputs(model: Any) -> dict[str, Any] | None:
    config, found = model.config, _make_unet_inputs(model)
    kinds = (config.encoder_hid_dim_type, config.addition_embed_type, config.attention_type)
    if found is None or kinds[0] not in (None, "text_proj") or kinds[1] not in (None, "text", "text_time"):
        return None
    if kinds[2] not in (None, "default"):
        return None
    width = config.encoder_hid_dim or config.cross_attention_dim
    found["encoder_hidden_states"] = draw(1, _NUM_TOKENS, width if isinstance(width, int) else width[0])
    if config.addition_embed_type == "text_time":
        size = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        found["added_cond_kwargs"] = {"text_embeds": draw(1, size), "time_ids": torch.rand(1, 6)}
    return found


def _add_labels(found: dict[str, Any], config: Any) -> dict[str, Any] | None:
    kind = config.class_embed_type
    if kind is None and config.num_class_embeds:
        found["class_labels"] = torch.zeros(1, dtype=torch.long)
    elif kind == "timestep":
        found["class_labels"] = _draw_steps()
    elif kind in ("projection", "simple_projection"):
        found["class_labels"] = draw(1, config.projection_class_embeddings_input_dim)
    return found if kind in (None, "timestep", "projection", "simple_projection") else None


def _make_autoencoder_inputs(model: Any) -> dict[str, Any]:
    config = model.config
    widths = config.get("encoder_block_out_channels") or config.block_out_channels
    channels = config.get("vq_embed_dim") or config.latent_channels
    return {"sample": _draw_image(config.in_channels, _find_side(widths)), "latents": _draw_image(channels, 2)}


def _make_joint_inputs(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "hidden_states": _draw_image(config.in_channels, 2 * config.patch_size),
        "timestep": _draw_steps(),
        "encoder_hidden_states": draw(1, _NUM_TOKENS, config.joint_attention_dim),
        "pooled_projections": draw(1, config.pooled_projection_dim),
    }


def _make_packed_inputs(model: Any) -> dict[str, Any]:
    config = model.config
    places = [torch.arange(count).float()[:, None].repeat(1, len(config.axes_dims_rope)) for count in (9, _NUM_TOKENS)]
    return {
        "hidden_states": draw(1, _NUM_PATCHES, config.in_channels),
        "encoder_hidden_states": draw(1, _NUM_TOKENS, config.joint_attention_dim),
        "pooled_projections": draw(1, config.pooled_projection_dim),
        "timestep": _draw_steps(),
        "img_ids": places[0],
        "txt_ids": places[1],
        **({"guidance": torch.rand(1)} if config.guidance_embeds else {}),
    }


def _make_labelled_inputs(model: Any) -> dict[str, Any]:
    config = model.config
    image = _draw_image(config.in_channels, config.sample_size)
    return {"hidden_states": image, "timestep": _draw_steps(), "class_labels": torch.zeros(1, dtype=torch.long)}


def _make_captioned_inputs(model: Any) -> dict[str, Any]:
    config = model.config
    sizes = {"resolution": torch.rand(1, 2), "aspect_ratio": torch.rand(1, 1)}
    return {
        "hidden_states": _draw_image(config.in_channels, config.sample_size),
        "timestep": _draw_steps(),
        "encoder_hidden_states": draw(1, _NUM_TOKENS, config.caption_channels or config.cross_attention_dim),
        "added_cond_kwargs": sizes if model.use_additional_conditions else dict.fromkeys(sizes),
    }


_INPUTS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "UNet2DModel": _make_unet_inputs,
    "UNet2DConditionModel": _make_conditioned_inputs,
    "AutoencoderKL": _make_autoencoder_inputs,
    "AutoencoderTiny": _make_autoencoder_inputs,
    "VQModel": _make_autoencoder_inputs,
    "SD3Transformer2DModel": _make_joint_inputs,
    "FluxTransformer2DModel": _make_packed_inputs,
    "DiTTransformer2DModel": _make_labelled_inputs,
    "PixArtTransformer2DModel": _make_captioned_inputs,
}
"""The classes that are built, and how to make the inputs of each."""
_LATENTS: dict[str, Callable[[Any], Tensor]] = {
    "AutoencoderKL": lambda encoded: encoded.latent_dist.parameters,
    "AutoencoderTiny": lambda encoded: encoded.latents,
    "VQModel": lambda encoded: encoded.latents,
}
"""The classes of autoencoders, and where the latents are in what they encode to."""
