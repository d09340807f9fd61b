"""Configurations that name code, files or addresses, or that are damaged: nothing is run, read or asked for."""

import json
import shutil
from typing import Any

import pytest

from tests.cli.attacks import MARKER, check_refused, look
from tests.cli.cli_files import write_llama

EVIL = "evil/evil"
CODE = f"open({MARKER!r}, 'w')"
CHANGES: dict[str, dict[str, Any]] = {
    "code of the folder": {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
    "code of the folder in part": {"auto_map": {"AutoModel": "evil.Evil"}},
    "code of a hub": {"auto_map": {"AutoModelForCausalLM": f"{EVIL}--evil.Evil"}},
    "a wrapper": {"model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"checkpoint_path": "evil.pt"}},
    "a wrapper of a hub": {"model_type": "timm_wrapper", "architecture": f"hf_hub:{EVIL}"},
    "a wrapped backbone": {"model_type": "timm_backbone", "backbone": "resnet18"},
    "a wrapper inside": {"text_config": {"model_type": "timm_wrapper", "architecture": "resnet18"}},
    "a wrapper in a list": {"parts": [{"model_type": "timm_backbone"}]},
    "attention of a hub": {"attn_implementation": EVIL},
    "attention of a hub, hidden": {"_attn_implementation": f"{EVIL}:fn"},
    "attention of a hub, as saved": {"_attn_implementation_internal": EVIL},
    "attention of a hub inside": {"text_config": {"attn_implementation": EVIL}},
    "experts of a hub": {"experts_implementation": EVIL},
    "attention by address": {"attn_implementation": "https://evil.example/kernel"},
    "attention by path": {"attn_implementation": "../evil"},
    "weights by arguments": {"model_args": {"pretrained": True}},
    "a file by arguments": {"backbone_kwargs": {"checkpoint_path": "../secret.json"}},
    "a backbone of a hub": {"backbone": f"hf_hub:{EVIL}", "backbone_config": None},
    "a backbone by address": {"backbone": "https://evil.example/x"},
    "a million layers": {"num_hidden_layers": 10**6},
    "layers beyond 64 bits": {"num_hidden_layers": 10**30},
    "layers beyond all numbers": {"num_hidden_layers": 1e308},
    "a million layers inside": {"text_config": {"num_hidden_layers": 10**6}},
    "layers as text": {"num_hidden_layers": "many"},
    "layers below zero": {"num_hidden_layers": -2},
    "a layer more": {"num_hidden_layers": 3},
    "a layer less": {"num_hidden_layers": 1},
    "another width": {"hidden_size": 32},
    "a width of nothing": {"hidden_size": 0},
    "a width below zero": {"hidden_size": -16},
    "a width as text": {"hidden_size": "16"},
    "a width beyond memory": {"hidden_size": 2**40},
    "heads that do not divide": {"num_attention_heads": 5},
    "no heads": {"num_attention_heads": 0},
    "a vocabulary beyond memory": {"vocab_size": 2**60},
    "another vocabulary": {"vocab_size": 47},
    "a vocabulary as text": {"vocab_size": CODE},
    "an unknown type": {"model_type": "evil"},
    "a type as a list": {"model_type": ["llama"]},
    "a type as a path": {"model_type": "../../evil"},
    "no type": {"model_type": None},
    "an activation of code": {"hidden_act": CODE},
    "an unknown activation": {"hidden_act": "evil"},
    "an activation as a dict": {"hidden_act": {"x": 1}},
    "another architecture": {"architectures": ["GPT2LMHeadModel"]},
    "an architecture of code": {"architectures": ["Pipeline"]},
    "an architecture that is a module": {"architectures": ["models"]},
    "rotary numbers as text": {"rope_parameters": {"rope_type": "evil", "rope_theta": "x"}},
}
FOR_WEIGHTS = (
    "a layer more", "a layer less", "layers below zero", "another width", "a width of nothing", "a width beyond memory",
    "another vocabulary",
)  # fmt: skip
"""They describe a model, which only its weights show to be another one. `inspect` builds it without memory."""
FILES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b'{"model_type": "\xff"}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"3",
    "text": b'"llama"',
    "nothing in it": b"{}",
    "deep nesting": b'{"a":' * 100_000,
    "deep lists": b'{"a":' + b"[" * 100_000,
    "a long number": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10_000 + b"}",
    "infinity": b'{"model_type": "llama", "hidden_size": Infinity}',
    "a pickle": b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch executed\x85R.",
    "Python": CODE.encode(),
}
COMMANDS = {"inspect": ("inspect", "llama", "--no-check"), "merge": ("merge", "llama", "llama", "-o", "out", "--no-check")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama") / "llama"
    write_llama(folder, seed=0)
    return folder


@pytest.fixture
def model(offline, llama):
    """A folder with code and a pickle beside the weights, and no way out of the machine."""
    folder = offline / "llama"
    shutil.copytree(llama, folder)
    (folder / "evil.py").write_text(f"{CODE}\nclass Evil: pass\n")
    (folder / "evil.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch executed\x85R.")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "command"), [(n, c) for n in CHANGES for c in COMMANDS if c != "inspect" or n not in FOR_WEIGHTS]
)
def test_nothing_is_run_or_asked_for(onebasin, attacked, model, name, command):
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **CHANGES[name]}))
    check_refused(onebasin, attacked, *COMMANDS[command])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_damaged_configurations_are_refused(onebasin, attacked, model, name, command):
    (model / "config.json").write_bytes(FILES[name])
    assert "config.json" in check_refused(onebasin, attacked, *COMMANDS[command])


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_needed_is_not_looked_at(onebasin, attacked, model):
    file = model / "config.json"
    more = {
        "quantization_config": {"quant_method": "evil", "modules": EVIL}, "use_pretrained_backbone": True,
        "_name_or_path": EVIL, "trust_remote_code": True, "base_model_name_or_path": "https://evil.example/x",
    }  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    before = look(attacked)
    assert onebasin(*COMMANDS["inspect"]).code == 0
    assert look(attacked) == before
