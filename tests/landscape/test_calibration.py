import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin.datasets import digits
from onebasin.landscape.batch_norm import reset_batch_norm
from onebasin.landscape.calibration import Moments, repair
from onebasin.landscape.paths import linear_path
from onebasin.tensors.interpolation import interpolate
from tests.landscape.plain_networks import batches, cnn, load, mix, mlp, snapshot, unchanged
from tests.networks import CASES, Fn, Tied


def statistics(model: nn.Module, data: list[Tensor], layers: list[int]) -> list[tuple[Tensor, Tensor]]:
    """An independent oracle: all outputs at once."""
    found = []
    with torch.no_grad():
        for layer in layers:
            outputs = torch.cat([copy.deepcopy(model).eval()[: layer + 1](x) for x in data]).transpose(0, 1).flatten(1)
            found.append((outputs.mean(1), outputs.std(1, correction=0)))
    return found


# ----------------------------------------------------------------------------------------------------------- statistics


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0, 1e6), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_moments_do_not_depend_on_the_batches(sizes, offset, seed):
    values = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    moments = Moments()
    for part in values.split(sizes):
        moments.add(part)
    mean, std = moments.result()
    torch.testing.assert_close(mean, values.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(std, values.std(0, correction=0), rtol=1e-7, atol=1e-9)


# --------------------------------------------------------------------------------------------------------------- REPAIR

NETS = {
    "mlp": (mlp, (4,), [0, 2, 4]),
    "mlp float32": (lambda seed: mlp(seed, dtype=torch.float32), (4,), [0, 2, 4]),
    "cnn": (cnn, (1, 6, 6), [0, 2, 6]),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3]])
def test_statistics_meet_the_interpolated_ones(name, weights):
    make, shape, layers = NETS[name]
    ends = [make(seed) for seed in range(3)]
    data = batches(*shape, dtype=ends[0][0].weight.dtype)
    symmetry = ob.symmetry(ends[0], data[0][:2])
    shares = weights or [1 / 3] * 3
    mixed = load(ends[0], interpolate(ends, shares))
    before = [snapshot(model) for model in (mixed, *ends)]
    result = repair(mixed, ends, data, symmetry, weights)
    assert all(unchanged(model, b) for model, b in zip((mixed, *ends), before, strict=True))
    assert result.repaired == tuple(map(str, layers))
    assert not result.skipped
    assert result.mismatch < 1e-3
    found = statistics(load(mixed, result.state), data, layers)
    goals = [statistics(end, data, layers) for end in ends]
    for i in range(len(layers)):
        for k in range(2):
            goal = sum(w * g[i][k] for w, g in zip(shares, goals, strict=True))
            torch.testing.assert_close(found[i][k], goal, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "repaired"),
    {
        "inverted residual with squeeze and excitation": "expand depthwise squeeze excite project",
        "grouped conv": "0 2",
        "densenet": "convs.0 convs.1",
        "mlp-mixer": "patches token1 channel1 channel2",
        "attention by hand": "embed qkv out",
        "block used three times": "embed",
    }.items(),
)
def test_other_architectures(name, repaired):
    torch.manual_seed(0)
    ends, inputs = [CASES[name].make().double().eval() for _ in range(2)], CASES[name].inputs()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    result = repair(mixed, ends, [inputs], ob.symmetry(ends[0], inputs, verify=False))
    assert result.repaired == tuple(repaired.split())
    assert result.mismatch < 1e-9


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_endpoints_and_data_may_be_on_another_device():
    ends, data = [mlp(0), mlp(1)], batches(4)
    symmetry = ob.symmetry(ends[0], data[0])
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    here, there = repair(mixed, ends, data, symmetry), repair(mixed.cuda(), ends, data, symmetry)
    for key, value in there.state.items():
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), here.state[key])


def test_one_batch_needs_no_more_than_the_papers_pass():
    ends, data = [mlp(0), mlp(1)], batches(4, num=1)
    symmetry = ob.symmetry(ends[0], data[0])
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    assert repair(mixed, ends, data, symmetry, tolerance=float("inf")).mismatch < 1e-9


def test_a_planted_distortion_is_undone():
    model, data = mlp(0), batches(4)
    distorted = copy.deepcopy(model)
    with torch.no_grad():
        for i in (0, 2, 4):
            distorted[i].weight.mul_(torch.rand(len(distorted[i].bias), 1) + 0.5)
            distorted[i].bias.add_(torch.randn(len(distorted[i].bias)))
    result = repair(distorted, [model], data, ob.symmetry(model, data[0]))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(result.state[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype, plain_kernels):
    ends, data = [mlp(s, dtype=dtype) for s in range(2)], batches(4, dtype=dtype)
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    result = repair(mixed, ends, data, ob.symmetry(mlp(0), batches(4)[0]))
    assert {value.dtype for value in result.state.values()} == {dtype}
    assert result.mismatch < 20 * torch.finfo(dtype).eps


def test_with_batch_norm_its_statistics_are_reset():
    torch.manual_seed(0)
    ends = [nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    data = batches(4, dtype=torch.float32)
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    result = repair(mixed, ends, data, ob.symmetry(ends[0], data[0]))
    expected = reset_batch_norm(mixed, data)
    assert all(torch.equal(value, result.state[key]) for key, value in expected.items())
    assert result.norms == ("1",)
    assert result.repaired == ()
    assert result.mismatch == 0


def test_layers_with_and_without_batch_norm():
    """With one batch, behind batch norm too every layer meets its goal; with several, batch norm averages."""
    ends, data = [cnn(0, norm=True), cnn(1, norm=True)], batches(1, 6, 6, num=1)
    ends = [load(end, reset_batch_norm(end, data)) for end in ends]
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    result = repair(mixed, ends, data, ob.symmetry(ends[0], data[0]))
    assert result.norms == ("1",)
    assert result.repaired == ("3", "7")
    assert result.mismatch < 1e-9
    layers = [1, 3, 7]
    found, *goals = (statistics(m, data, layers) for m in (load(mixed, result.state), *ends))
    for (mean, std), (mean_a, std_a), (mean_b, std_b) in zip(found, *goals, strict=True):
        torch.testing.assert_close(mean, (mean_a + mean_b) / 2, rtol=0.01, atol=0.01)
        torch.testing.assert_close(std, (std_a + std_b) / 2, rtol=0.01, atol=0.01)


def test_the_barrier_of_a_trained_pair_falls():
    images, labels = digits("train")
    held_out, answers = digits("test")

    def train(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        sizes = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
        model = nn.Sequential(nn.Flatten(), *sizes)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return model

    def evaluate(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(held_out), answers)

    a, b = train(0), train(1)
    path = linear_path(a, b, evaluate, num_points=3)
    mixed = load(a, interpolate([a, b], [0.5, 0.5]))
    result = repair(mixed, [a, b], list(images.split(300)), ob.symmetry(a, images[:2]))
    assert path.barrier > 0.3
    with torch.no_grad():
        after = float(evaluate(load(mixed, result.state))) - (path.losses[0] + path.losses[-1]) / 2
    assert after < 0.6 * path.barrier


def test_a_constant_unit_is_only_shifted():
    ends = [mlp(0), mlp(1)]
    with torch.no_grad():
        ends[0][0].weight[0] = -ends[1][0].weight[0]  # the two cancel in the middle
    data = batches(4)
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    result = repair(mixed, ends, data, ob.symmetry(ends[0], data[0]))
    assert all(value.isfinite().all() for value in result.state.values())
    assert result.state["0.weight"][0].abs().max() == 0
    assert result.mismatch > 0.1  # and says so


# ------------------------------------------------------------------------------------------------------------- refusals


def repair_mixture(make, x, **options):
    ends = [make(), make()]
    mixed = load(ends[0], interpolate(ends, [0.5, 0.5]))
    return repair(mixed, ends, [x], ob.symmetry(ends[0], x), **options)


def test_layers_that_cannot_be_folded_are_skipped():
    def forward(m, x):
        h = torch.relu(m.normed(torch.relu(m.bare(torch.relu(m.first(x))))))
        for _ in range(2):
            h = h + torch.relu(m.twice(h))
        return m.head(h)

    def make():
        return Fn(
            forward,
            first=nn.Linear(4, 8),
            bare=nn.Linear(8, 8, bias=False),
            normed=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            twice=nn.Linear(8, 8),
            head=nn.Linear(8, 2),
        )

    result = repair_mixture(make, torch.randn(9, 4))
    assert result.repaired == ("first",)
    assert result.skipped == {
        "bare": "it has no bias to take the shift",
        "normed": "its weight is computed from other tensors",
        "twice": "it is called 2 times in one pass",
    }


def test_transposed_convolutions_are_skipped():
    def make():
        layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2), nn.ReLU(), nn.Conv2d(4, 1, 1)]
        return nn.Sequential(*layers)

    result = repair_mixture(make, torch.randn(2, 1, 6, 6))
    assert result.repaired == ("0",)
    assert result.skipped == {"2": "its units are not the first axis of its weight"}


def test_tied_layers_are_skipped():
    result = repair_mixture(Tied, torch.arange(6).view(2, 3))
    assert set(result.repaired) == {"up", "down"}
    assert result.state["embed.weight"] is result.state["head.weight"]


def test_nothing_to_repair_is_refused():
    with pytest.raises(ValueError, match=r"no layer to repair \(0: it has no bias"):
        repair_mixture(lambda: mlp(0, bias=False), batches(4)[0])
    with pytest.raises(ValueError, match=r"no layer to repair \(no linear or convolutional layer"):
        repair_mixture(lambda: nn.Linear(4, 2), torch.randn(3, 4))


def test_a_symmetry_written_by_hand_will_do():
    model, x = mlp(0), batches(4)[0]
    by_hand = ob.Symmetry.from_axes({"0.weight": "h i", "0.bias": "h", "2.weight": "o h"}, free=["h"])
    assert repair(model, [model], [x], by_hand).repaired == ("0",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1.0]}, "2 models and 1 weights"),
        ({"weights": [0.5, 0.6]}, "sum to one"),
        ({"weights": [-0.5, 1.5]}, "not be negative"),
        ({"weights": [float("nan"), 1.0]}, "finite"),
    ],
)
def test_weights_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        repair_mixture(lambda: mlp(0), batches(4)[0], **options)


def test_other_refusals():
    model, x = mlp(0), batches(4)[0]
    symmetry = ob.symmetry(model, x)
    with pytest.raises(ValueError, match="no endpoints"):
        repair(model, [], [x], symmetry)
    with pytest.raises(TypeError, match="read once"):
        repair(model, [model], iter([x]), symmetry)
    with pytest.raises(ValueError, match=r"model 2 has no '0.weight'"):
        repair(model, [{}], [x], symmetry)
    with pytest.raises(ValueError, match="outputs of '0' are not finite"):
        repair(model, [model], [x * torch.nan], symmetry)
    with pytest.raises(ValueError, match="no batches"):
        repair(model, [model], [], symmetry)


# ---------------------------------------------------------------------------------------------------------- other forms


def test_rescaling_meets_the_deviations_and_shifts_nothing():
    a, b, data = mlp(0), mlp(1), batches(4)
    middle = mix(a, b)
    found = repair(middle, [a, b], data, ob.symmetry(a, data[0]), form="rescale")
    layers = [0, 2, 4]
    ends = [statistics(model, data, layers) for model in (a, b)]
    for layer, (_, std), first, second in zip(layers, statistics(load(a, found.state), data, layers), *ends, strict=True):
        torch.testing.assert_close(std, (first[1] + second[1]) / 2)
        ratio = found.state[f"{layer}.bias"] / middle[layer].bias
        torch.testing.assert_close(found.state[f"{layer}.weight"], middle[layer].weight * ratio[:, None])
    assert found.mismatch < 1e-9


def test_the_closed_form_uses_correlations():
    a, b, data = mlp(0), mlp(1), batches(4)
    found = repair(mix(a, b), [a, b], data, ob.symmetry(a, data[0]), form="closed-form")
    outputs = [torch.cat([model[0](x) for x in data]).detach() for model in (a, b)]
    s0, s1 = (o.std(0, correction=0) for o in outputs)
    rho = torch.stack([torch.corrcoef(torch.stack(units))[0, 1] for units in zip(*(o.T for o in outputs), strict=True)])
    expected = (s0**2 + s1**2 + 2 * rho * s0 * s1).sqrt() / 2
    goal = (s0 + s1) / 2
    # The first layer has the same inputs in all three networks: there the closed form is exact.
    ((mean, std),) = statistics(load(a, found.state), data, [0])
    torch.testing.assert_close(std, goal)
    torch.testing.assert_close(mean, (outputs[0].mean(0) + outputs[1].mean(0)) / 2)
    torch.testing.assert_close(found.state["0.weight"], mix(a, b)[0].weight * (goal / expected)[:, None])


def test_forms_are_checked():
    a, data = mlp(0), batches(4)
    symmetry = ob.symmetry(a, data[0])
    with pytest.raises(ValueError, match="form must be one of 'repair'"):
        repair(a, [a, a], data, symmetry, form="repairs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rescale' measures the units"):
        repair(a, [a, a], None, symmetry, form="rescale")


@pytest.mark.parametrize("form", ["repair", "rescale", "closed-form", "norms", "bias"])
def test_points_of_a_line_are_repaired(form):
    a, b, data = mlp(0), mlp(1), batches(4)
    symmetry = ob.symmetry(a, data[0])

    def norm(model: nn.Module) -> float:
        return model(data[0]).square().mean().item()

    path = linear_path(a, b, norm, num_points=3, data=data, repair=form, symmetry=symmetry)
    found = repair(mix(a, b), [a, b], data, symmetry, tolerance=float("inf"), form=form)
    assert path.losses == pytest.approx([norm(a), norm(load(a, found.state)), norm(b)])
    with pytest.raises(ValueError, match="give the symmetry"):
        linear_path(a, b, norm, repair=form, data=data)
