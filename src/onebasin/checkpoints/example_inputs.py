"""Example inputs of Hugging Face models: text, images and sound, as their configurations describe them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

_NUM_TOKENS = 8
_NUM_FRAMES = 8
"""Steps in time that are left of a sound after the convolutions."""
_USUAL_SIDE = 224
"""Of images, for models that take any size and do not name one."""
_MOST_ENTRIES = 2**27
"""Of one input: an image of 6,600 by 6,600 pixels."""
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Entries of models that put images in the place of some tokens. They take text alone as well."""


def make_example_inputs(model: Any, config: Any) -> dict[str, Tensor] | None:
    """What to call a model with, by name; None if its inputs are not known.

    Args:
        model: of transformers, on any device.
        config: its configuration.

    Raises:
        ValueError: if the inputs that it describes are too large.
    """
    taken = inspect.signature(model.forward).parameters
    makers = {
        "input_ids": _make_tokens,
        "pixel_values": _make_image,
        "input_features": _make_features,
        "input_values": _make_sound,
        "decoder_input_ids": _make_tokens,
    }
    if any(getattr(config, name, None) is not None for name in _IMAGE_TOKENS):
        del makers["pixel_values"]
    found = {name: make(config) for name, make in makers.items() if name in taken}
    known = {name: value for name, value in found.items() if value is not None}
    return known if model.main_input_name in known else None


def _make_tokens(config: Any) -> Tensor:
    size = getattr(config.get_text_config(), "vocab_size", None)
    return torch.arange(_NUM_TOKENS).remainder(size if isinstance(size, int) and size > 0 else _NUM_TOKENS).unsqueeze(0)


def _make_image(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _USUAL_SIDE
    if isinstance(size, dict):
        size = [size.get("height", _USUAL_SIDE), size.get("width", _USUAL_SIDE)]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return draw(1, getattr(vision, "num_channels", 3), height, width)


def _make_features(config: Any) -> Tensor | None:
    """A spectrogram: of the whole length that the encoder has positions for, which Whisper insists on."""
    bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    return draw(1, bins, 2 * positions) if bins and positions else None


def _make_sound(config: Any) -> Tensor | None:
    """A sound of which the convolutions leave some frames; or a spectrogram."""
    kernels, strides = (getattr(config, name, None) for name in ("conv_kernel", "conv_stride"))
    if kernels and strides:
        length = _NUM_FRAMES
        for kernel, stride in reversed(list(zip(kernels, strides, strict=True))):
            length = (length - 1) * stride + kernel
        return draw(1, length)
    bins, length = (getattr(config, name, None) for name in ("num_mel_bins", "max_length"))
    return draw(1, length, bins) if bins and length else None


def draw(*shape: int) -> Tensor:
    """Numbers of a normal distribution.

    Raises:
        ValueError: if they are too many.
    """
    if math.prod(shape) > _MOST_ENTRIES:
        raise ValueError(f"the configuration asks for inputs of shape {shape}, which are too large: give --input-shape")
    return torch.randn(shape)
