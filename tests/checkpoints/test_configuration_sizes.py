"""A configuration with more layers, experts or tokens than its tensors can have is refused before it is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import find_architecture, open_models
from onebasin.checkpoints.configuration_sizes import check_entries, check_sizes

FILE = Path("config.json")
TENSORS = {f"layers.{number}.weight": torch.empty(8, 4, device="meta") for number in range(290)}


@pytest.mark.parametrize(
    "content",
    [
        {"num_hidden_layers": 10**6},
        {"n_layer": 10**300},
        {"n_layers": 1e6},
        {"num_layers": float("inf")},
        {"encoder_layers": 10**6},
        {"decoder_layers": 10**6},
        {"num_decoder_layers": 10**6},
        {"depths": [2, 10**6]},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"parts": [{"num_hidden_layers": 10**6}]},
    ],
)
def test_too_many_layers_are_refused(content):
    with pytest.raises(ValueError, match=r"config\.json says \w+: .*, but the checkpoint has 290 tensors: the conf"):
        check_sizes(content, FILE, TENSORS)
    with pytest.raises(ValueError, match="at most 1000 are built"):
        check_sizes(content, FILE)


@pytest.mark.parametrize(
    "content",
    [
        {"num_experts": 10**6},
        {"num_local_experts": 10**6},
        {"n_routed_experts": 10**6},
        {"moe_num_experts": 10**6},
        {"text_config": {"num_experts": 10**6}},
        {"vocab_size": 10**9},
        {"image_size": 10**7},
        {"vision_config": {"image_size": [10**7, 8]}},
        {"hidden_size": 10**8},
        {"d_model": 10**8},
        {"conv_dim": [8, 10**8]},
    ],
)
def test_what_no_axis_is_long_enough_for_is_refused(content):
    with pytest.raises(ValueError, match=r"config\.json says \w+: \d+, but .* 290 tensors, no axis of them longer than 8"):
        check_sizes(content, FILE, TENSORS)
    with pytest.raises(ValueError, match=r"at most \d+ are built"):
        check_sizes(content, FILE)


def test_ordinary_configurations_are_not():
    content = {
        "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 10**6, "depths": [3, 3, 27, 3], "layer_norm_eps": 1e-5,
        "use_layers": True, "layers": None, "mlp_only_layers": [], "layer_types": ["full_attention"] * 32,
        "num_experts": 512, "num_experts_per_tok": 8, "max_position_embeddings": 10**7, "rope_theta": 5 * 10**8,
        "image_size": 1024, "conv_dim": [512] * 7,
    }  # fmt: skip
    large = {**TENSORS, "embed.weight": torch.empty(10**6, 4, device="meta")}
    check_sizes(content, FILE, large)
    check_sizes(content, FILE)
    few = {"w": torch.empty(2, device="meta")}
    check_sizes({"num_hidden_layers": 12}, FILE, few)  # a model may leave out layers that its configuration names


def test_experts_in_one_stack_are_counted_by_its_axis():
    stacked = {"experts": torch.empty(600, 4, 4, device="meta")}
    check_sizes({"num_experts": 600}, FILE, stacked)
    with pytest.raises(ValueError, match="says num_experts: 601"):
        check_sizes({"num_experts": 601}, FILE, stacked)


def test_entries_of_the_model_are_compared():
    model = torch.nn.Linear(10**4, 10**5, device="meta")
    with pytest.raises(ValueError, match="has 1000100000 entries, but the checkpoint has 9280"):
        check_entries(model, FILE, TENSORS)
    check_entries(model, FILE, {"weight": torch.empty(10**5, 10**3, device="meta")})  # quantised, ten to a number
    check_entries(model, FILE)
    model.register_buffer("mask", torch.empty(10**5, 10**5, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="computes tables of 10000000000 entries"):
        check_entries(model, FILE)


@pytest.mark.parametrize("entry", ["num_hidden_layers", "vocab_size", "num_local_experts"])
def test_nothing_is_built(tmp_path, monkeypatch, entry):
    transformers = pytest.importorskip("transformers")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(transformers.MixtralConfig, "from_dict", lambda *_, **__: pytest.fail("a model was built"))
    for count in (10**7, 10**12):
        content = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], entry: count}
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="but the checkpoint has 1 tensors"):
            open_models([tmp_path])
        with pytest.raises(ValueError, match=r"at most \d+ are built"):
            find_architecture(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("vit", {"image_size": 100000, "patch_size": 4}),  # more positions than fit into memory
        ("gpt_neo", {"max_position_embeddings": 10**6}),  # a mask of so many rows and columns
        ("gptj", {"n_positions": 10**9}),  # sinusoids
        ("llama", {"hidden_size": 120000, "vocab_size": 120000, "intermediate_size": 120000}),
    ],
)
def test_no_memory_is_taken_for_what_the_tensors_cannot_be(tmp_path, kind, entries):
    transformers = pytest.importorskip("transformers")
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]()
    content = {**config.to_dict(), "architectures": None, **entries}
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the model of .* has \d+ entries, but the checkpoint has 2"):
        open_models([tmp_path])
