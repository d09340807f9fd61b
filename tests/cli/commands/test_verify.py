import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import onebasin as ob
from tests.cli.cli_files import MLP, load, write_llama
from tests.cli.cli_networks import make_partly_used, make_transformer


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_that_may_be_rounding_is_told_apart(onebasin, folder, dtype):
    """From a real one, and from none: the exit code is 0 with a tolerance that allows it, and only then."""
    model, x = make_transformer()
    torch.manual_seed(0)
    rounded = {key: value.to(dtype) for key, value in model.state_dict().items()}
    transform = ob.Transform.random(ob.symmetry(model, x, kinds="all"), torch.Generator().manual_seed(0))
    for name, state in {"x.pt": rounded, "y.pt": transform.apply(rounded)}.items():
        torch.save(state, folder / name)
    command = ("verify", "x.pt", "y.pt", "--model", "cli_networks:make_transformer")
    ran = onebasin(*command)
    assert ran.code == 1
    assert "same function  not shown" in ran.out
    name = str(dtype).removeprefix("torch.")
    assert f"no more than rounding all numbers to {name} does" in ran.err.replace("\n", " ")
    record = onebasin(*command, "--json").record
    assert not record["same"]
    assert 1e-9 < record["difference"] < record["rounding"]
    tolerance = re.search(r"--tolerance (\S+) takes", record["notes"][-1])
    assert tolerance is not None
    assert record["difference"] <= float(tolerance[1]) < 10 * record["difference"]
    assert onebasin(*command, "--tolerance", tolerance[1]).code == 0

    state = transform.apply(rounded)
    key = next(key for key, value in state.items() if value.dim() == 2)
    state[key][0] *= 1 + 64 * torch.finfo(dtype).eps  # a row that is off by 64 of its last digits
    torch.save(state, folder / "z.pt")
    ran = onebasin("verify", "x.pt", "z.pt", *command[3:], "--json")
    assert ran.code == 1
    assert ran.record["difference"] > ran.record["rounding"] > 0
    assert ran.record["notes"] == []
    assert re.search(r"same function  no *\n", onebasin("verify", "x.pt", "z.pt", *command[3:]).out)


def test_files_that_differ_in_a_last_digit_are_not_the_same(onebasin, folder):
    """No tolerance comes from the type of the files: what could be rounding is not shown to be none."""
    state = load(folder / "b.pt")
    state["1.weight"][0, 0] *= 1 + 2e-7
    torch.save(state, folder / "c.pt")
    ran = onebasin("verify", "a.safetensors", "c.pt", *MLP)
    assert ran.code == 1
    assert "same function  not shown" in ran.out
    assert onebasin("verify", "a.safetensors", "b.pt", *MLP, "--json").record["rounding"] == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_are_compared_on_a_device(onebasin, folder):
    assert onebasin("verify", "a.safetensors", "b.pt", *MLP, "--device", "cuda").code == 0
    write_llama(folder / "llama", seed=0)
    assert onebasin("verify", "llama", "llama", "--device", "cuda").code == 0
