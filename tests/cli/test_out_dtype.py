"""--out-dtype: the type of floating tensors in the output, for every command that writes a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file

from onebasin.checkpoints import open_checkpoint
from tests.cli.cli_files import MLP, digest, load, write_llama
from tests.cli.cli_networks import make_transformer


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "command",
    [
        ("align", "a.safetensors", "b.pt", *MLP),
        ("align", "a.safetensors", "b.pt", *MLP, "--symmetry", "positive"),
        ("merge", "a.safetensors", "b.pt", *MLP),
        ("apply", "p.safetensors", "b.pt", "--inverse"),
        ("canonical", "a.safetensors", *MLP),
    ],
)
def test_outputs_have_the_type(onebasin, folder, command, name):
    ran = onebasin(*command, "-o", "c.pt", "--out-dtype", name)
    assert ran.code == 0, ran.err
    found = load(folder / "c.pt")
    assert {value.dtype for value in found.values()} == {getattr(torch, name)}
    for key, value in load(folder / "a.safetensors").items():
        torch.testing.assert_close(found[key], value.to(found[key].dtype), rtol=1e-2, atol=1e-2)
    if command[0] in ("align", "canonical"):
        assert (f"c.pt is rounded to {name}, and computes what it did up to that rounding" in ran.err) == ("16" in name)


def test_merges_of_narrow_models_are_rounded_once(onebasin, folder):
    """Their average has more digits than they have."""
    states = [{key: torch.randn_like(value).bfloat16() for key, value in load(folder / "b.pt").items()} for _ in range(2)]
    for state, name in zip(states, ("x.safetensors", "y.safetensors"), strict=True):
        save_file(state, folder / name)
    for name in ("float32", "bfloat16"):
        ran = onebasin("merge", "x.safetensors", "y.safetensors", "-o", f"{name}.pt", *MLP, "--out-dtype", name)
        assert ran.code == 0, ran.err
    assert onebasin("merge", "x.safetensors", "y.safetensors", "-o", "plain.pt", *MLP).code == 0
    wide, narrow, plain = (load(folder / f"{name}.pt") for name in ("float32", "bfloat16", "plain"))
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wide.values())
    for key, value in wide.items():
        assert torch.equal(value.bfloat16(), narrow[key])
        assert torch.equal(plain[key], narrow[key])


def test_folders_are_loaded_in_the_type(onebasin, folder):
    transformers = pytest.importorskip("transformers")
    for number in range(2):
        write_llama(folder / f"{number}", number)
    ran = onebasin("align", "0", "1", "-o", "c", "--out-dtype", "float16", "--method", "weight-matching")
    assert ran.code == 0, ran.err
    configuration = json.loads((folder / "c" / "config.json").read_text())
    assert "float16" in (configuration.get("dtype"), configuration.get("torch_dtype"))
    assert set(open_checkpoint(folder / "c").dtypes) == {"float16"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "c", dtype="auto")
    assert model.dtype == torch.float16


def test_refusals(onebasin, folder):
    state = load(folder / "b.pt")
    torch.save({**state, "3.bias": torch.full((12,), 1e6)}, folder / "large.pt")
    before = digest(folder)
    ran = onebasin("apply", "p.safetensors", "large.pt", "-o", "c.pt", "--out-dtype", "float16")
    assert ran.code == 3
    assert "'3.bias' holds numbers that are too large for torch.float16" in ran.err
    assert onebasin("apply", "p.safetensors", "b.pt", "-o", "c.pt", "--out-dtype", "int8").code == 2
    assert digest(folder) == before


@pytest.mark.parametrize("name", ["canonical", "align", "align positive"])
def test_a_wider_output_is_computed_in_its_type(onebasin, folder, name):
    """Its function is that of the float32 input, to the rounding of float64."""
    torch.manual_seed(0)
    for file in ("x.pt", "y.pt"):
        model, _ = make_transformer()
        for key, parameter in model.named_parameters():
            if "norm" in key or key == "2.weight":
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        torch.save(model.state_dict(), folder / file)
    architecture = ("--model", "cli_networks:make_transformer")
    commands = {
        "canonical": ("canonical", "y.pt"),
        "align": ("align", "x.pt", "y.pt", "--symmetry", "all"),
        "align positive": ("align", "x.pt", "y.pt", "--symmetry", "positive"),
    }
    ran = onebasin(*commands[name], "-o", "c.pt", "--out-dtype", "float64", *architecture)
    assert ran.code == 0, ran.err
    assert {value.dtype for value in load(folder / "c.pt").values()} == {torch.float64}
    ran = onebasin("verify", "y.pt", "c.pt", *architecture)
    assert ran.code == 0, ran.out
