"""Unusual types, deep nesting, full disks and files that change are told in one sentence; they are no error of ours."""

import resource

import pytest
import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.checkpoints.reading import FileVersion
from tests.cli.cli_files import MLP, digest, load
from tests.cli.cli_networks import make_mlp

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["int8", "uint16", "bool", "complex64", "float8_e4m3fn", "float8_e8m0fnu"])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_weights_of_every_type_are_moved(onebasin, folder, name, ending):
    dtype, state = getattr(torch, name), load(folder / "a.safetensors")
    for key in ("1.weight", "3.weight", "5.weight"):
        codes = torch.randint(2, (len(state[key]), state[key][0].numel() * dtype.itemsize), dtype=torch.uint8)
        state[key] = codes.view(dtype).view_as(state[key])
    torch.save(state, folder / "q.pt") if ending == "pt" else save_file(state, folder / "q.safetensors")
    assert onebasin("apply", "p.safetensors", f"q.{ending}", "-o", f"moved.{ending}").code == 0
    moved, wide = load(folder / f"moved.{ending}"), ob.Permutation.load(folder / "p.safetensors")
    for key, value in state.items():
        expected = wide.move(value.to(torch.complex128), wide.symmetry.layouts[key])
        assert moved[key].dtype == value.dtype
        assert torch.equal(moved[key].to(torch.complex128), expected)


@pytest.mark.parametrize("command", ["align", "merge", "canonical", "verify"])
def test_integers_are_not_computed_with(onebasin, folder, command):
    state = load(folder / "a.safetensors")
    save_file({**state, "3.weight": (100 * state["3.weight"]).to(torch.int8)}, folder / "q.safetensors")
    before = digest(folder)
    files = ("q.safetensors",) if command == "canonical" else ("q.safetensors", "b.pt")
    ran = onebasin(command, *files, *MLP, *(() if command == "verify" else ("-o", "out.safetensors")))
    assert ran.code == 3
    assert "'3.weight' in q.safetensors has the type torch.int8, and the model computes with torch.float32" in ran.err
    assert digest(folder) == before


def test_deep_nesting_is_refused(onebasin, folder):
    for name in ("config.json", "adapter_config.json", "model.safetensors.index.json"):
        (folder / name).write_text(DEEP)
    save_file({"3.lora_A.weight": torch.ones(2, 12)}, folder / "lora.safetensors")
    endless = []
    endless.append(endless)
    torch.save({**load(folder / "b.pt"), "extra": endless}, folder / "endless.pt")
    before = digest(folder)
    for arguments in (
        ("inspect", "config.json"),
        ("apply", "p.safetensors", "lora.safetensors", "-o", "out.safetensors"),
        ("apply", "p.safetensors", "model.safetensors.index.json", "-o", "out"),
        ("apply", "p.safetensors", "endless.pt", "-o", "out.pt"),
    ):
        ran = onebasin(*arguments)
        assert ran.code == 3
        assert "nested too deeply" in ran.err or "is not a configuration, or it is damaged" in ran.err
    assert digest(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("apply", "p.safetensors", "a.safetensors", "-o", "out.safetensors"),
        ("apply", "p.safetensors", "a.safetensors", "-o", "out.pt"),
        ("apply", "p.safetensors", "adam.pt", "-o", "out.pt"),
        ("align", "a.safetensors", "b.pt", "-o", "out.pt", *MLP),
    ],
)
def test_a_disk_that_fills_up_is_told(onebasin, folder, arguments):
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1, 8, 8)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "adam.pt")
    before = digest(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # stands for a disk with little space
    try:
        ran = onebasin(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.code == 3
    assert ran.err.splitlines()[-1] == f"error: {arguments[arguments.index('-o') + 1]}: File too large"
    assert digest(folder) == before


def test_an_input_that_shrinks_is_told(onebasin, folder, monkeypatch):
    for name in ("a.safetensors", "b.pt"):
        content = (folder / name).read_bytes()
        check = FileVersion.check

        def shrink(version, check=check, content=content):
            version.file.write_bytes(content[:500])
            check(version)

        monkeypatch.setattr(FileVersion, "check", shrink)
        ran = onebasin("apply", "p.safetensors", name, "-o", "out.pt")
        monkeypatch.undo()
        monkeypatch.chdir(folder)
        assert ran.code == 3
        assert f"{name} was changed while it was read" in ran.err
    assert not (folder / "out.pt").exists()


def write_quantized(folder, dtype=torch.int8):
    """q.safetensors: a.safetensors with codes for the second layer, and a scale for each of its rows."""
    state = load(folder / "a.safetensors")
    scale = state["3.weight"].abs().amax(1, keepdim=True) / 100
    save_file(
        {**state, "3.weight": (state["3.weight"] / scale).to(dtype), "3.weight_scale": scale}, folder / "q.safetensors"
    )


def test_scales_follow_the_weights(onebasin, folder):
    write_quantized(folder)
    for ignore in ((), ("--ignore", "*_scale")):  # both ways: they are not left behind
        ran = onebasin("apply", "p.safetensors", "q.safetensors", "-o", "out.safetensors", "--force", *ignore)
        assert ran.code == 0
        assert "such as 3.weight_scale, are moved with them" in ran.err
        before, after = load(folder / "q.safetensors"), load(folder / "out.safetensors")
        before["3.weight"] = before["3.weight"].float() * before.pop("3.weight_scale")
        expected = ob.Permutation.load(folder / "p.safetensors").apply(before)
        assert torch.equal(after["3.weight"].float() * after["3.weight_scale"], expected["3.weight"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("command", ["align", "merge", "canonical", "verify"])
def test_quantised_models_are_not_computed_with_without_their_scales(onebasin, folder, command, dtype):
    write_quantized(folder, dtype)
    files = ("q.safetensors",) if command == "canonical" else ("a.safetensors", "q.safetensors")
    ran = onebasin(command, *files, *MLP, "--ignore", "*_scale", *(() if command == "verify" else ("-o", "out.pt")))
    assert ran.code == 3
    assert "'3.weight' in q.safetensors is quantised, with the scale '3.weight_scale'" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("align", "a.safetensors", "more.pt", *MLP),
        ("merge", "more.pt", "a.safetensors", "--reference", "mean", *MLP),
        ("apply", "p.safetensors", "more.pt"),
    ],
)
def test_ignored_tensors_beside_moving_weights_are_refused(onebasin, folder, arguments):
    torch.save({**load(folder / "b.pt"), "3.running_scale": torch.ones(12)}, folder / "more.pt")
    before = digest(folder)
    ran = onebasin(*arguments, "-o", "out.pt", "--ignore", "*scale")
    assert ran.code == 3
    assert "'3.running_scale' in more.pt is not in the model, but beside '3.weight', whose units move" in ran.err
    assert digest(folder) == before


def test_an_optimizer_whose_order_is_not_known_is_refused(onebasin, folder):
    model = make_mlp()
    parameters = dict(model.named_parameters())
    model(torch.ones(1, 1, 8, 8)).sum().backward()
    layers = [[name for name in parameters if name[0] in digits] for digits in ("3", "15")]
    for file, groups in (
        ("bare.pt", [{"params": [parameters[name] for name in layer]} for layer in layers]),
        ("named.pt", [{"params": [(name, parameters[name]) for name in layer]} for layer in layers]),
    ):
        optimizer = torch.optim.Adam(groups)
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / file)
    ran = onebasin("apply", "p.safetensors", "bare.pt", "-o", "out.pt")
    assert ran.code == 3
    assert "groups of parameters without names, and it cannot be told which of its states of shape (12,)" in ran.err
    assert onebasin("apply", "p.safetensors", "named.pt", "-o", "out.pt").code == 0
    before, after = (torch.load(folder / name)["state"][1]["exp_avg"] for name in ("named.pt", "out.pt"))
    permutation = ob.Permutation.load(folder / "p.safetensors")
    assert torch.equal(after, permutation.move(before, permutation.symmetry.layouts["3.bias"]))
