"""Example inputs of Hugging Face models are made from their configurations."""

from typing import Any

import pytest

from onebasin.checkpoints.example_inputs import make_example_inputs

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
SEQUENCES = {
    "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 6, "decoder_ffn_dim": 6, "vocab_size": 5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
PAIR = {"text_config": {**SMALL, "vocab_size": 40}, "vision_config": {**SMALL, "image_size": 12, "patch_size": 4}}
SPECTROGRAM = {"num_mel_bins": 4, "max_source_positions": 6, "suppress_tokens": None, "begin_suppress_tokens": None}
CASES: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    ("BertModel", {**SMALL, "vocab_size": 5}, {"input_ids": (1, 8)}),
    ("CLIPModel", PAIR, {"input_ids": (1, 8), "pixel_values": (1, 3, 12, 12)}),
    ("SiglipModel", PAIR, {"input_ids": (1, 8), "pixel_values": (1, 3, 12, 12)}),
    ("CLIPVisionModel", PAIR["vision_config"], {"pixel_values": (1, 3, 12, 12)}),
    ("WhisperModel", {**SEQUENCES, **SPECTROGRAM}, {"input_features": (1, 4, 12), "decoder_input_ids": (1, 8)}),
    ("BartModel", SEQUENCES, {"input_ids": (1, 8), "decoder_input_ids": (1, 8)}),
    ("ResNetModel", {"embedding_size": 4, "hidden_sizes": [4], "depths": [1]}, {"pixel_values": (1, 3, 224, 224)}),
    ("ViTModel", {**SMALL, "image_size": [8, 16], "patch_size": 4, "num_channels": 1}, {"pixel_values": (1, 1, 8, 16)}),
    (
        "Wav2Vec2Model",
        {**SMALL, "conv_dim": [4, 4], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embedding_groups": 2},
        {"input_values": (1, 90)},
    ),
    ("ASTModel", {**SMALL, "num_mel_bins": 16, "max_length": 24}, {"input_values": (1, 24, 16)}),
]


@pytest.mark.parametrize(("kind", "entries", "expected"), CASES, ids=[kind for kind, _, _ in CASES])
def test_models_take_their_example_inputs(kind, entries, expected):
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**entries)
    model = model_class(config).eval()
    inputs = make_example_inputs(model, config)
    assert inputs is not None
    assert {name: tuple(value.shape) for name, value in inputs.items()} == expected
    model(**inputs)


def test_the_convolutions_leave_frames_of_a_sound():
    config = transformers.Wav2Vec2Config()
    inputs = make_example_inputs(transformers.Wav2Vec2Model, config)
    assert inputs is not None
    length = inputs["input_values"].shape[-1]
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        length = (length - kernel) // stride + 1
    assert length == 8


def test_unknown_inputs():
    assert make_example_inputs(transformers.EncodecModel, transformers.EncodecConfig()) is None


def test_inputs_that_are_too_large_are_refused():
    config = transformers.ResNetConfig(image_size=10**5)
    with pytest.raises(
        ValueError, match=r"inputs of shape \(1, 3, 100000, 100000\), which are too large: give --input-shape"
    ):
        make_example_inputs(transformers.ResNetModel, config)
