"""Hostile configurations: nothing that they name is read, run or asked for."""

import json
import os
import pickle
import socket
from pathlib import Path

import pytest

from onebasin.checkpoints.architectures import find_architecture
from onebasin.checkpoints.plain_configurations import make_plain, offline

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def find(folder: Path, content: dict):
    (folder / "config.json").write_text(json.dumps(content))
    return find_architecture(str(folder))


HOSTILE = {
    "timm wrapper": {
        "model_type": "timm_wrapper", "architecture": "resnet18", "architectures": ["TimmWrapperForImageClassification"],
        "model_args": {"checkpoint_path": "bomb.pt"},
    },
    "timm wrapper of a hub": {"model_type": "timm_wrapper", "architecture": "hf_hub:evil/evil"},
    "timm backbone": {"model_type": "timm_backbone", "backbone": "hf-hub:evil/evil"},
    "remote kernel": {**LLAMA, "attn_implementation": "evil/evil"},
    "remote kernel of an earlier version": {**LLAMA, "_attn_implementation": "evil/evil:attention"},
    "remote experts": {**LLAMA, "experts_implementation": "evil/evil"},
    "remote kernel inside": {"model_type": "llava", "text_config": {**LLAMA, "attn_implementation": "evil/evil"}},
    "code in the folder": {**LLAMA, "auto_map": {"AutoModel": "modeling_evil.Evil"}},
    "code for a part": {"model_type": "llava", "text_config": {**LLAMA, "auto_map": {"AutoModel": "modeling_evil.Evil"}}},
    "backbone from a hub": {"model_type": "detr", "backbone": "hf_hub:evil/evil", "use_timm_backbone": True},
    "backbone from an address": {"model_type": "detr", "backbone": "https://evil.example/weights"},
    "weights of a backbone": {"model_type": "detr", "backbone_kwargs": {"checkpoint_path": "bomb.pt"}},
    "wrapper as a backbone": {"model_type": "detr", "backbone_config": {"model_type": "timm_backbone"}},
    "wrapper in a list": {"model_type": "detr", "parts": [{"model_type": "timm_backbone"}]},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configurations_are_refused(name, tmp_path):
    fuse = tmp_path / "ran"
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps(Bomb(fuse)))
    (tmp_path / "modeling_evil.py").write_text(f"open({str(fuse)!r}, 'w')")
    with pytest.raises(ValueError, match="give --model"):
        find(tmp_path, HOSTILE[name])
    assert not fuse.exists()


def test_backbones_are_built_without_their_weights(tmp_path):
    content = {"use_pretrained_backbone": True, "inner": {"use_pretrained_backbone": True, "hidden_size": 3}}
    assert make_plain(content, tmp_path) == {
        "use_pretrained_backbone": False,
        "inner": {"use_pretrained_backbone": False, "hidden_size": 3},
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2", None])
def test_plain_configurations_are_built(implementation, tmp_path):
    pytest.importorskip("transformers")
    content = LLAMA if implementation is None else {**LLAMA, "attn_implementation": implementation}
    assert make_plain(content, tmp_path) == content
    if implementation != "flash_attention_2":
        assert find(tmp_path, content).on_meta().config.hidden_size == 16


def test_the_hub_is_offline_meanwhile(monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = constants.HF_HUB_OFFLINE
    with offline():
        assert constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    assert before == constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ
    assert os.environ["TRANSFORMERS_OFFLINE"] == "0"
