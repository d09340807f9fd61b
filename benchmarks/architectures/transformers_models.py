"""The families of `transformers`, each from a tiny configuration; what a model takes is read from its signature."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.architecture import (
    Architecture,
    Example,
    Inputs,
    NotMade,
    tokens,
)
from benchmarks.architectures.tiny_configurations import GIVEN, LEFT_OUT, VARIANTS, VOCABULARY, shrink
from onebasin.cli.torchvision_operators import declare_missing_operators

_HEADS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "CTC", "OBJECT_DETECTION",
    "MASK_GENERATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "TEXT_TO_SPECTROGRAM", "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_OBJECT_DETECTION", "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION",
)  # fmt: skip
"""Tasks whose model is taken rather than the bare one, the first that a family has."""


def transformers_architectures() -> Iterator[Architecture]:
    """Every type of model that the library has."""
    declare_missing_operators()
    from transformers.models.auto import configuration_auto, modeling_auto

    seen = set()
    for name, config_name in sorted(configuration_auto.CONFIG_MAPPING_NAMES.items()):
        class_name = _find_class(name, modeling_auto)
        if class_name is None or name in LEFT_OUT or (config_name, class_name) in seen:
            continue
        seen.add((config_name, class_name))
        kind = "DETR" if "detr" in name or name == "table-transformer" else ""
        yield Architecture(
            "transformers",
            name,
            lambda a=(name, config_name, class_name): make_example(*a),
            kind=kind,
            counted=_COUNTED.get(name),
        )
        for variant, given in VARIANTS.get(name, {}).items():
            make = lambda a=(name, config_name, class_name, given): make_example(*a)  # noqa: E731
            yield Architecture("transformers", f"{name}, {variant}", make, kind=f"{kind}, {variant}" if kind else "")


_MIXTURES = {
    "mixtral",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "switch_transformers",
    "flex_olmo",
    "jamba",
    "minimax",
}

# Heads (with grouped queries also the query heads of each), query-key units (unless rotary positions pin them), value units
# and the inside of the MLP in each block; the stream.
_COUNTED = {
    "gpt2": 1 + 2 * 4,
    "llama": 1 + 2 * 4,
    "mistral": 1 + 2 * 4,
    "qwen2": 1 + 2 * 4,
    "qwen3": 1 + 2 * 4,
    "gemma": 1 + 2 * 4,
    "gemma2": 1 + 2 * 4,
    "phi": 1 + 2 * 5,  # half of each query-key unit is rotary; the other half is free
    "phi3": 1 + 2 * 4,
    "opt": 1 + 2 * 4,
    "bert": 1 + 2 * 4,  # the head's transform ends in the stream's tied embedding
    # Encoder and decoder share one embedding, so one stream; a block of the decoder has two attentions. Units of 6
    # attentions, 4 MLPs; one table of positions for all blocks ties the heads of the encoder, and those of the decoder's
    # self-attentions, but not those of its 2 cross-attentions.
    "t5": 1 + 6 * 2 + 4 + (1 + 1 + 2),
    "bart": 1 + 6 * 3 + 4,
    "vit": 1 + 2 * 4,
    "deit": 1 + 2 * 4,
    "whisper": 3 + 6 * 3 + 4,  # first convolution, two streams
}


def _find_class(name: str, modeling_auto: Any) -> str | None:
    for head in (*(f"MODEL_FOR_{head}" for head in _HEADS), "MODEL"):
        found = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(name)
        if found:
            return found if isinstance(found, str) else found[0]
    return None


def make_example(name: str, config_name: str, class_name: str, given: dict[str, Any] | None = None) -> Example:
    """A tiny model, with these entries of its configuration, and the first call its signature suggests that it takes.

    Raises:
        NotMade: if it cannot be made, is not tiny, or takes none of them.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    try:
        model_class = getattr(transformers, class_name)
        config = _fit(shrink(getattr(transformers, config_name), GIVEN.get(name, {}) | (given or {})), model_class)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > 2 * 10**7:
            raise NotMade(f"its tiny configuration has {size / 1e6:.0f} million parameters")
        config._attn_implementation = "eager"
        model = model_class(config).eval()
    except NotMade:
        raise
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    return find_call(model)


def _fit(config: Any, model_class: Any) -> Any:
    """The configuration, or the part of it that a class is for."""
    if isinstance(config, model_class.config_class):
        return config
    return next(part for part in vars(config).values() if isinstance(part, model_class.config_class))


class Outputs(nn.Module):
    """A Hugging Face model as a function of tensors, without a cache: what it predicts, or a readout of its first result."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.readout: nn.Module | None = None

    def forward(self, **inputs: Tensor) -> Any:
        """All predictions; without any, five linear functions of the first result, so that its units are hidden ones."""
        result = self.run(inputs)
        if self.readout is None:
            return self.predictions(result)
        first = self.first(result)
        return self.readout(first if first.dim() < 4 else first.mean((-2, -1)))

    def run(self, inputs: dict[str, Tensor]) -> Any:
        """What the model returns."""
        options = {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}
        return self.model(**inputs, **options, return_dict=True)

    @staticmethod
    def predictions(result: Any) -> list[Tensor]:
        """Logits, boxes, masks and the like."""
        return [
            v for k, v in result.items() if isinstance(v, Tensor) and re.search("logits|^pred|^iou_scores|reconstruction", k)
        ]

    @staticmethod
    def first(result: Any) -> Tensor:
        """The first result that has features."""
        return next(v for v in result.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1)


def find_call(model: nn.Module) -> Example:
    """The first call among those that the signature suggests that the model takes.

    Raises:
        NotMade: if there is none.
    """
    wrapped, failures = Outputs(model), []
    for inputs, length, others, is_text in _suggest_calls(model):
        try:
            with torch.no_grad():
                result = wrapped.run(inputs(2, length))
                if not wrapped.predictions(result):
                    first = wrapped.first(result)
                    width = first.shape[-1] if first.dim() < 4 else first.shape[1]
                    wrapped.readout = nn.Linear(width, 5)
                wrapped(**inputs(2, length))
        except Exception as error:
            failures.append(f"{'+'.join(inputs(1, length))}: {type(error).__name__}: {str(error)[:200]}")
            continue
        mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
        kind = "mixture of experts" if mixture else ""
        return Example(wrapped, inputs, length, others, is_text, kind, lambda: _use_plain_experts(model))
    raise NotMade("; ".join(failures) or f"nothing is known of {list(inspect.signature(model.forward).parameters)}")


def _use_plain_experts(model: Any) -> None:
    """The product of all experts at once exists in float32 and less."""
    with contextlib.suppress(ValueError, KeyError):
        model.set_experts_implementation("eager")


Suggestion = tuple[Inputs, int, tuple[int, ...], bool]


def _suggest_calls(model: Any) -> Iterator[Suggestion]:
    names = list(inspect.signature(model.forward).parameters)
    main, config = model.main_input_name, model.config
    texts = {n: _TEXT_INPUTS[n] for n in names if n in _TEXT_INPUTS}
    image = _find(config, "image_size", 32)
    image = image if isinstance(image, int) else max(image)
    channels = _find(config, "num_channels", 3)
    sides = (image, (image + 32,))
    decoder = {n: make for n, make in texts.items() if n.startswith("decoder")}
    pictures = [
        lambda b, n: torch.randn(b, channels, n, n),
        lambda b, n: torch.randn(b, _find(config, "num_frames", 4), channels, n, n),
    ]
    if "pixel_values" in names:
        for picture in pictures:
            if "input_ids" in names:
                yield _join({"pixel_values": picture}, {k: _fixed(v) for k, v in texts.items()}), *sides, False
            yield _join({"pixel_values": picture}, {k: _fixed(v) for k, v in decoder.items()}), *sides, False
            yield _join({"pixel_values": picture}), *sides, False
    if "pixel_values_videos" in names:
        yield _join({"pixel_values_videos": pictures[1]}), *sides, False
    if "input_ids" in names:
        yield _join(texts), 7, (9, 12), True
        yield _join({"input_ids": texts["input_ids"]}, decoder), 7, (9, 12), True
        yield _join({"input_ids": texts["input_ids"]}), 7, (9, 12), True
    bins = _find(config, "num_mel_bins", None) or _find(config, "input_feat_per_channel", 16)
    features = [lambda b, n: torch.randn(b, n, bins), lambda b, n: torch.randn(b, bins, n)]
    sounds = [*features, lambda b, n: torch.randn(b, 40 * n), lambda b, n: torch.randn(b, 1, 40 * n)]
    for name in ("input_features", "input_values", "audio_values"):
        for sound in sounds if name in names else ():
            for length in (24, _find(config, "max_source_positions", 32) * 2, _find(config, "max_length", 32)):
                yield _join({name: sound}, {k: _fixed(v) for k, v in decoder.items()}), length, (length + 8,), False
    if main == "inputs_embeds":
        width = config.hidden_size
        yield _join({"inputs_embeds": lambda b, n: torch.randn(b, n, width)}), 7, (9, 12), False


def _find(config: Any, name: str, default: Any) -> Any:
    """An entry of a configuration or of its parts."""
    from transformers import PreTrainedConfig

    found = getattr(config, name, None)
    if found is not None:
        return found
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return next((found for part in parts if (found := _find(part, name, None)) is not None), default)


def _join(*parts: dict[str, Inputs]) -> Inputs:
    makers = {name: make for part in parts for name, make in part.items()}
    return lambda batch, length: {name: make(batch, length) for name, make in makers.items()}


def _fixed(make: Inputs, length: int = 6) -> Inputs:
    return lambda batch, _: make(batch, length)


def _ids(batch: int, length: int) -> Tensor:
    return tokens(batch, length, VOCABULARY - 16)


def _boxes(batch: int, length: int) -> Tensor:
    corners = torch.randint(0, 30, (batch, length, 2))
    return torch.cat([corners, corners + torch.randint(1, 30, (batch, length, 2))], -1)


_TEXT_INPUTS: dict[str, Callable[[int, int], Tensor]] = {"input_ids": _ids, "decoder_input_ids": _ids, "bbox": _boxes}
