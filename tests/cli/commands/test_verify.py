import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.cli_files import MLP, load, write_llama
from tests.cli.cli_networks import make_partly_used


def test_verify_answers_by_its_exit_code(onebasin, folder):
    ran = onebasin("verify", "a.safetensors", "b.pt", *MLP)
    assert ran.code == 0
    assert "same function  yes" in ran.out
    state = load(folder / "b.pt")
    state["1.weight"][0, 0] += 1e-3
    torch.save(state, folder / "c.pt")
    ran = onebasin("verify", "a.safetensors", "c.pt", *MLP, "--json")
    assert ran.code == 1
    assert not ran.record["same"]
    assert 1e-9 < ran.record["difference"] < 1
    assert onebasin("verify", "a.safetensors", "c.pt", *MLP, "--tolerance", "1").code == 0


def test_verify_sees_every_token_and_both_configurations(onebasin, folder):
    write_llama(folder / "t", seed=0)
    assert onebasin("verify", "t", "t").code == 0
    write_llama(folder / "u", seed=0)
    config = json.loads((folder / "u" / "config.json").read_text())
    (folder / "u" / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    ran = onebasin("verify", "t", "u")
    assert ran.code == 1
    assert "same function  no" in ran.out
    write_llama(folder / "v", seed=0)
    index = json.loads((folder / "v" / "model.safetensors.index.json").read_text())
    shard = folder / "v" / index["weight_map"]["model.embed_tokens.weight"]
    state = load_file(shard)
    state["model.embed_tokens.weight"][47, 0] += 1
    save_file(state, shard, metadata={"format": "pt"})
    ran = onebasin("verify", "t", "v", "--json")
    assert ran.code == 1
    assert ran.record["difference"] > 1e-6
    assert ran.record["rows"] == {"model.embed_tokens.weight": [48, 48]}
    assert ran.record["longest"] == 64


def test_verify_names_tensors_that_no_input_reaches(onebasin, folder):
    model = ("--model", "cli_networks:make_partly_used")
    state = make_partly_used()[0].state_dict()
    torch.save(state, folder / "c.pt")
    ran = onebasin("verify", "c.pt", "c.pt", *model)
    assert ran.code == 0
    assert "1 tensors, in part or whole; 0 of them differ there" in ran.out
    state["spare"][0] += 1
    torch.save(state, folder / "d.pt")
    ran = onebasin("verify", "c.pt", "d.pt", *model)
    assert ran.code == 1
    assert "same function  not shown" in ran.out
    assert "spare" in ran.out
    assert onebasin("verify", "c.pt", "d.pt", *model, "--json").record["different_unreached"] == ["spare"]


def test_a_device_that_is_not_there_is_refused(onebasin, folder):
    ran = onebasin("verify", "a.safetensors", "b.pt", *MLP, "--device", "nowhere")
    assert ran.code == 3
    assert "cannot compute on 'nowhere'" in ran.err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_are_compared_on_a_device(onebasin, folder):
    assert onebasin("verify", "a.safetensors", "b.pt", *MLP, "--device", "cuda").code == 0
    write_llama(folder / "llama", seed=0)
    assert onebasin("verify", "llama", "llama", "--device", "cuda").code == 0
