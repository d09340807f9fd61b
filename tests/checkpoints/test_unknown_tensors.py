import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import onebasin as ob
from onebasin.checkpoints import check_left, fit_names, open_checkpoint
from onebasin.checkpoints.moving import move_file
from onebasin.checkpoints.unknown_tensors import find_scales


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, ob.symmetry(model, torch.randn(2, 4)).random()


def quantize(state, dtype=torch.int8, suffix="weight_scale", keep=True):
    """The state with codes and a scale for each row in place of every weight."""
    found = {}
    for key, value in state.items():
        if not key.endswith("weight"):
            found[key] = value
            continue
        scale = value.abs().amax(1, keepdim=keep) / 100
        codes = value / (scale if keep else scale[:, None])
        found[key] = (codes.round() if dtype == torch.int8 else codes).to(dtype)
        found[f"{key.removesuffix('weight')}{suffix}"] = scale
    return found


def dequantize(state, suffix="weight_scale"):
    scales = {key: state[f"{key.removesuffix('weight')}{suffix}"] for key in state if key.endswith(".weight")}
    wide = {key: state[key].float() * scale.reshape(-1, 1) for key, scale in scales.items()}
    return {**{key: value for key, value in state.items() if key.endswith("bias")}, **wide}


@pytest.mark.parametrize(
    ("dtype", "suffix", "keep"),
    [(torch.int8, "weight_scale", True), (torch.int8, "SCB", False), (torch.float8_e4m3fn, "weight_scale", True)],
)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_scales_move_with_the_rows_of_their_weights(tmp_path, network, dtype, suffix, keep, prefix):
    model, permutation = network
    state = quantize(model.state_dict(), dtype, suffix, keep)
    save_file({f"{prefix}{key}": value for key, value in state.items()}, tmp_path / "q.safetensors")
    moved = move_file(permutation, tmp_path / "q.safetensors")
    assert any(f"such as {prefix}0.{suffix}, are moved with them" in note for note in moved.notes)
    moved.write(tmp_path / "out.safetensors")
    found = open_checkpoint(tmp_path / "out.safetensors").load()
    assert found.keys() == {f"{prefix}{key}" for key in state}
    plain = {key.removeprefix(prefix): value for key, value in found.items()}
    assert all(plain[key].dtype == value.dtype for key, value in state.items())
    for key, value in permutation.apply(dequantize(state, suffix)).items():
        assert torch.equal(dequantize(plain, suffix)[key], value)


def test_scales_of_a_whole_weight_stay(tmp_path, network):
    model, permutation = network
    state = quantize(model.state_dict())
    state |= {key: torch.tensor([0.5]) for key in state if key.endswith("scale")}
    state |= {"0.input_scale": torch.tensor(0.25)}
    save_file(state, tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=r"'0.input_scale' in .* is not in the model"):
        move_file(permutation, tmp_path / "q.safetensors")
    move_file(permutation, tmp_path / "q.safetensors", ignore=["*.input_scale"]).write(tmp_path / "out.safetensors")
    found = open_checkpoint(tmp_path / "out.safetensors").load()
    assert all(torch.equal(found[key], value) for key, value in state.items() if key.endswith("scale"))


@pytest.mark.parametrize("shape", [(1, 6), (6, 2), (3, 3), (12,)])
def test_scales_that_cannot_follow_are_refused(tmp_path, network, shape):
    model, permutation = network
    save_file({**quantize(model.state_dict()), "2.weight_scale": torch.ones(shape)}, tmp_path / "q.safetensors")
    for ignore in ((), ("*_scale",)):
        with pytest.raises(ValueError, match=r"is not one number for each row of '2.weight': it cannot follow"):
            move_file(permutation, tmp_path / "q.safetensors", ignore=ignore)


def test_codes_are_not_multiplied(tmp_path, network):
    model, _ = network
    symmetry = ob.symmetry(model, torch.randn(2, 4), kinds="positive")
    transform = ob.Transform.random(symmetry, torch.Generator().manual_seed(0))
    state = quantize(model.state_dict())
    save_file(state, tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=r"'0.weight' in .* torch.int8: it can be permuted, but not be multiplied"):
        move_file(transform, tmp_path / "q.safetensors")
    move_file(ob.Transform(transform.permutation, {}), tmp_path / "q.safetensors").write(tmp_path / "out.safetensors")
    found = dequantize(open_checkpoint(tmp_path / "out.safetensors").load())
    for key, value in transform.permutation.apply(dequantize(state)).items():
        assert torch.equal(found[key], value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("2.running_scale", (6,), "beside '2.(weight|bias)', whose units move"),
        ("2.fake_quant.scale", (6, 1), "beside '2.(weight|bias)', whose units move"),
        ("4.running_scale", (3,), None),  # outputs do not move
        ("2.buffer", (), None),
        ("2.index", (49, 49), None),
        ("other.scale", (6,), None),
        ("20.scale", (6,), None),
    ],
)
def test_what_lies_beside_moving_weights_is_not_left(tmp_path, network, name, shape, message):
    model, permutation = network
    save_file({**model.state_dict(), name: torch.ones(shape)}, tmp_path / "m.safetensors")
    checkpoint = fit_names(open_checkpoint(tmp_path / "m.safetensors"), model.state_dict(), ignore=[name])
    if message is None:
        check_left(checkpoint, permutation.symmetry)
        move_file(permutation, tmp_path / "m.safetensors", ignore=[name])
        return
    with pytest.raises(ValueError, match=message):
        check_left(checkpoint, permutation.symmetry)
    for kind in ("auto", "task-vector"):
        with pytest.raises(ValueError, match=message):
            move_file(permutation, tmp_path / "m.safetensors", kind, ignore=[name])


def test_learned_scales_of_ordinary_weights_are_no_quantisation(tmp_path):
    save_file({"a.weight": torch.ones(2, 2), "a.scale": torch.ones(2), "b.scale": torch.ones(2)}, tmp_path / "m.safetensors")
    assert find_scales(open_checkpoint(tmp_path / "m.safetensors")) == {}
