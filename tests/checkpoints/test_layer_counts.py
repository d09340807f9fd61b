"""A configuration with more layers than there are tensors is refused before it is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import find_architecture, open_models
from onebasin.checkpoints.layer_counts import check_layer_counts

FILE = Path("config.json")


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
    with pytest.raises(ValueError, match=r"config\.json says \w+: .*, but the checkpoint has 290 tensors"):
        check_layer_counts(content, FILE, 290)
    with pytest.raises(ValueError, match="at most 1000 are built"):
        check_layer_counts(content, FILE)


def test_ordinary_configurations_are_not():
    content = {
        "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 10**6, "depths": [3, 3, 27, 3], "layer_norm_eps": 1e-5,
        "use_layers": True, "layers": None, "mlp_only_layers": [], "layer_types": ["full_attention"] * 32,
    }  # fmt: skip
    check_layer_counts(content, FILE, 290)
    check_layer_counts(content, FILE)
    check_layer_counts({"num_hidden_layers": 12}, FILE, 3)  # a model may leave out layers that its configuration names


def test_nothing_is_built(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for count in (10**6, 10**12):
        content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": count}
        (tmp_path / "config.json").write_text(json.dumps(content))
        monkeypatch.setattr(transformers.LlamaConfig, "from_dict", lambda *_, **__: pytest.fail("a model was built"))
        with pytest.raises(ValueError, match="but the checkpoint has 1 tensors"):
            open_models([tmp_path])
        with pytest.raises(ValueError, match="at most 1000 are built"):
            find_architecture(str(tmp_path))
