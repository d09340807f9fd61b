import json
import sys

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.checkpoints import find_architecture
from onebasin.checkpoints.factories import build_hollow
from onebasin.tensors.states import find_ties

FACTORIES = """
from torch import nn
import torch

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def with_inputs():
    return make(), torch.zeros(1, 4)

def needs_values():
    model = make()
    return model if torch.linspace(0, 1, 3)[1].item() else None

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def broken():
    raise RuntimeError("out of order")

def wants_arguments(width):
    return make()

def wrong():
    return 3

value = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "their_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return "their_factories"


def test_factories(factories):
    expected = ob.symmetry(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4)).groups
    for name in ("make", "needs_values", "Net"):
        found = find_architecture(f"{factories}:{name}", ["1,4"])
        assert found.symmetry().groups == expected
        assert found.shapes()["0.weight"].shape == (8, 4)
    assert find_architecture(f"{factories}:with_inputs").symmetry().groups == expected
    meta = find_architecture(f"{factories}:make", ["1,4"]).on_meta()
    assert all(p.is_meta for p in meta.parameters())
    assert find_architecture(f"{factories}:make", ["1,4"]).symmetry(verify=False).groups == expected


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("nothing", "there is no model 'nothing': give package.module:factory"),
        ("no_such_module:make", "cannot import no_such_module:make: ModuleNotFoundError"),
        ("{}:nothing", "cannot import .*:nothing: AttributeError"),
        ("{}:value", "is a int, not a callable"),
        ("{}:wrong", "returned a int, not a torch.nn.Module"),
        ("{}:wants_arguments", "cannot be called without arguments"),
        ("{}:make", "the example inputs of .* are not known: give --input-shape"),
    ],
)
def test_refusals(factories, specification, message):
    with pytest.raises(ValueError, match=message):
        find_architecture(specification.format(factories)).build()


def test_a_factory_that_fails_is_told_of(factories):
    with pytest.raises(ValueError, match=r"their_factories:broken failed: RuntimeError: out of order"):
        find_architecture(f"{factories}:broken", ["1,4"])


def test_installed_modules_come_before_those_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "their_own_nets.py").write_text(FACTORIES)
    (tmp_path / "scipy.py").write_text(FACTORIES)
    assert find_architecture("their_own_nets:make", ["1,4"]).shapes()["0.weight"].shape == (8, 4)
    with pytest.raises(ValueError, match=r"cannot import scipy:make: .* comes before scipy.py in the working folder"):
        find_architecture("scipy:make", ["1,4"])


def test_torchvision():
    pytest.importorskip("torchvision")
    found = find_architecture("torchvision:resnet18")
    assert found.example_inputs.shape == (1, 3, 224, 224)
    assert len(found.symmetry(verify=False).groups) == 12
    with pytest.raises(ValueError, match=r"torchvision has no model 'resnet51'; did you mean resnet50"):
        find_architecture("torchvision:resnet51")


def test_timm():
    timm = pytest.importorskip("timm")
    assert timm.__version__
    found = find_architecture("timm:resnet18")
    assert found.example_inputs.shape == (1, 3, 224, 224)
    assert len(found.symmetry(verify=False).groups) == 12
    with pytest.raises(ValueError, match=r"timm has no model 'resnet_18'; did you mean"):
        find_architecture("timm:resnet_18")


def write_config(folder, config, name):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [name]}))
    return str(folder)


def test_hugging_face_folders(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}
    configs = {
        "llama": (transformers.LlamaConfig(**small), "LlamaForCausalLM"),
        "bert": (transformers.BertConfig(**small), "BertForMaskedLM"),
        "gpt2": (transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32), "GPT2LMHeadModel"),
        "vit": (transformers.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=32, patch_size=8),
                "ViTForImageClassification"),
    }  # fmt: skip
    for name, (config, kind) in configs.items():
        found = find_architecture(write_config(tmp_path / name, config, kind))
        model = found.build()
        assert type(model).__name__ == kind
        assert found.symmetry().num_free > 0  # verified on random weights in float64
        assert found.shapes().keys() == model.state_dict().keys()


def test_the_cache_of_a_decoder_is_turned_off(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    assert config.use_cache
    folder = write_config(tmp_path / "gpt2", config, "GPT2LMHeadModel")
    before = (tmp_path / "gpt2" / "config.json").read_bytes()
    found = find_architecture(folder, ["input_ids=1,4:long"])
    assert found.symmetry().num_free == find_architecture(folder).symmetry().num_free > 0
    assert "use_cache=False" in found.notes[0]
    assert (tmp_path / "gpt2" / "config.json").read_bytes() == before
    config.use_cache = False
    assert find_architecture(write_config(tmp_path / "without", config, "GPT2LMHeadModel")).notes == ()


def test_no_code_from_a_folder_is_run(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Evil: pass\n")
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoModel": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is code in that folder, which is never run"):
        find_architecture(str(folder))
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="transformers does not know the model type 'evil'"):
        find_architecture(str(folder))
    for text in ("{", "[]", "3"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="is not a configuration, or it is damaged"):
            find_architecture(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ValueError, match="transformers cannot build the model of"):
        find_architecture(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json: give the architecture with --model"):
        find_architecture(str(folder))
    assert not (tmp_path / "it ran").exists()


class Parts(nn.Module):
    """A layer that is registered twice, a parameter that two layers share, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)
        self.again, self.second.weight = self.first, self.first.weight
        self.recurrent = nn.LSTM(300, 100)
        self.register_buffer("angles", torch.linspace(0, 1, 300), persistent=False)

    def forward(self, x):
        return self.recurrent(self.second(self.again(x) * self.angles))[0]


def test_hollow_modules_take_no_memory_and_are_traced_like_others():
    hollow, whole = build_hollow(Parts), Parts()
    assert not hollow.training
    assert find_ties(hollow) == find_ties(whole)
    described = ({k: (v.shape, v.dtype, v.device) for k, v in each.state_dict().items()} for each in (hollow, whole))
    assert next(described) == next(described)
    assert torch.equal(hollow.angles, whole.angles)
    assert sum(parameter.untyped_storage().nbytes() for parameter in hollow.parameters()) < 20_000
    assert not torch.equal(hollow.first.weight[0], hollow.first.weight[1])
    x = torch.randn(2, 3, 300)
    assert ob.symmetry(hollow, x).groups == ob.symmetry(whole, x).groups


class Measured(nn.Module):
    """Its constructor reads a parameter, and keeps what it has read."""

    def __init__(self, branches: bool = False):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("size", self.layer.weight.norm().detach())
        if branches and float(self.layer.weight.norm()) > 0:
            self.layer.bias = None


@pytest.mark.parametrize("branches", [False, True])
def test_hollow_modules_whose_constructors_need_values_are_built_with_them(branches):
    hollow = build_hollow(lambda: Measured(branches))
    assert not any(tensor.is_meta for tensor in (*hollow.parameters(), *hollow.buffers()))
    assert (hollow.layer.bias is None) == branches
    assert isinstance(nn.Linear(2, 2).weight, nn.Parameter)
    assert not nn.Linear(2, 2).weight.is_meta


def test_narrow_types_of_hollow_modules_are_widened():
    hollow = build_hollow(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).bfloat16())
    assert {tensor.dtype for tensor in hollow.state_dict().values()} == {torch.float32, torch.int64}
