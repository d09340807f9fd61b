import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onebasin.tensors.interpolation import interpolate, read_alike
from tests.networks import Tied


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_mixes_floating_tensors(weights):
    models = [net(seed).double() for seed in range(len(weights))]
    mixed = interpolate(models, weights)
    for key, value in models[0].state_dict().items():
        if value.is_floating_point():
            expected = sum(w * m.state_dict()[key] for w, m in zip(weights, models, strict=True))
            torch.testing.assert_close(mixed[key], expected, rtol=1e-12, atol=1e-12)


def test_integer_buffers_come_from_the_first():
    a, b = net(0), net(1)
    a[1].num_batches_tracked.fill_(7)
    mixed = interpolate([a, b], [0.0, 1.0])
    assert mixed["1.num_batches_tracked"] == 7
    assert mixed["1.num_batches_tracked"] is not a[1].num_batches_tracked


def test_the_ends_are_exact_and_ignore_what_has_no_weight():
    a, b = net(0), net(1)
    with torch.no_grad():
        b[0].weight.fill_(torch.inf)
    for key, value in interpolate([a, b], [1, 0]).items():
        assert torch.equal(value, a.state_dict()[key])


def test_nothing_is_mutated_or_shared():
    a, b = net(0), net(1)
    before = {key: value.clone() for key, value in a.state_dict().items()}
    mixed = interpolate([a, b], [1.0, 0.0])
    for value in mixed.values():
        value.zero_()
    assert all(torch.equal(value, before[key]) for key, value in a.state_dict().items())
    assert not any(value.requires_grad for value in mixed.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(dtype):
    values = torch.randn(9, 200).to(dtype)
    mixed = interpolate([{"w": v} for v in values], [1 / 9] * 9)["w"]
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed, values.float().mean(0).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_dtype_is_the_firsts_and_the_sum_as_wide_as_the_widest():
    a, b = torch.randn(50), torch.randn(50, dtype=torch.float64)
    assert torch.equal(interpolate([{"w": a}, {"w": b}], [0.3, 0.7])["w"], (0.3 * a.double() + 0.7 * b).float())
    assert interpolate([{"w": a.to(torch.float8_e4m3fn)}, {"w": a}], [1, 0])["w"].dtype == torch.float8_e4m3fn


def test_complex_tensors_are_mixed():
    a, b = (torch.randn(5, dtype=torch.complex64) for _ in range(2))
    torch.testing.assert_close(interpolate([{"w": a}, {"w": b}], [0.5, 0.5])["w"], (a + b) / 2)


@pytest.mark.parametrize("read", [lambda m: m, lambda m: m.state_dict(), lambda m: m.state_dict(keep_vars=True)])
def test_ties_stay_one_tensor(read):
    mixed = interpolate([read(Tied()), read(Tied())], [0.5, 0.5])
    assert mixed["embed.weight"] is mixed["head.weight"]


def test_an_omitted_alias_comes_back():
    a, b = Tied(), Tied()
    short = {key: value for key, value in b.state_dict().items() if key != "head.weight"}
    for order in ([a, short], [short, a]):
        mixed = interpolate(order, [0.5, 0.5])
        assert mixed["embed.weight"] is mixed["head.weight"]
        torch.testing.assert_close(mixed["embed.weight"], (a.embed.weight + b.embed.weight).detach() / 2)


def test_broken_ties_are_refused():
    broken = {key: value.clone() for key, value in Tied().state_dict().items()}
    broken["head.weight"] += 1
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' are one tied tensor"):
        interpolate([Tied(), broken], [0.5, 0.5])


def test_what_is_not_a_tensor_passes_through():
    assert interpolate([{"w": torch.ones(1), "_extra_state": "a"}] * 2, [0.5, 0.5])["_extra_state"] == "a"


@pytest.mark.parametrize(
    ("states", "weights", "message"),
    [
        ([], [], "at least one"),
        ([{}], [1, 2], "1 models and 2 weights"),
        ([{"w": torch.ones(2)}], [float("nan")], "finite"),
        ([{"w": torch.ones(2)}, {}], [1, 0], "model 2 has no 'w'"),
        ([{}, {}, {"w": torch.ones(2)}], [1, 0, 0], "the first model has no 'w', which model 3 has"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2, 1)}], [1, 0], r"'w' has shape \(2,\) .* \(2, 1\) in model 2"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2).long()}], [1, 0], "torch.float32 .* torch.int64 in model 2"),
        ([{"w": torch.ones(2)}, {"w": None}], [1, 0], "NoneType in model 2"),
    ],
)
def test_refusals(states, weights, message):
    with pytest.raises(ValueError, match=message):
        interpolate(states, weights)


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match="state dict"):
        read_alike([torch.ones(2)])  # type: ignore[list-item]
