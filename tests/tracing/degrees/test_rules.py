"""Scales that were found by hand for small networks, and traps that have none; what is found is verified in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob


def powers(model, x):
    """For each scale its exponents by tensor."""
    scales = ob.symmetry(model, x, kinds="positive").scales
    return {name: {key: [p.exponent for p in found] for key, found in s.powers.items()} for name, s in scales.items()}


def mlp(activation):
    return nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))


UNIT = {"0.weight": {"0.weight": [1], "0.bias": [1], "2.weight": [-1]}}


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(), nn.PReLU(), nn.Identity(), nn.Dropout()])
def test_functions_that_commute_with_positive_factors(activation):
    assert powers(mlp(activation), torch.randn(5, 4)) == UNIT


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU(), nn.ReLU6(), nn.Hardtanh(), nn.Softmax(-1), nn.ELU()])
def test_functions_that_do_not(activation):
    assert powers(mlp(activation), torch.randn(5, 4)) == {}


class Between(nn.Module):
    """Two linear layers with a function between them, of the hidden units."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def change(model, symmetry):
    """What a random transform of a symmetry changes in the outputs of a model, at random weights in float64."""
    torch.manual_seed(0)
    model, x = model.double().eval(), torch.randn(50, 4, dtype=torch.float64)
    moved = ob.Transform.random(symmetry, torch.Generator().manual_seed(1)).apply(model)
    with torch.no_grad():
        before, after = model(x), torch.func.functional_call(model, moved, (x,))
    return float((after - before).abs().max() / before.abs().max())


KEEPING = {
    "clamp(min=0)": lambda h: h.clamp(min=0),
    "clamp(max=0)": lambda h: h.clamp(max=0.0),
    "clamp(0, inf)": lambda h: h.clamp(0, math.inf),
    "clamp(min=zeros)": lambda h: h.clamp(min=torch.zeros(6)),
    "clamp between itself": lambda h: h.clamp(0.1 * h.abs(), 0.5 * h.abs()),
    "clamp_min": lambda h: torch.clamp_min(h, 0),
    "clamp_max, in place": lambda h: h.clone().clamp_max_(0),
    "maximum with zeros": lambda h: torch.maximum(h, torch.zeros_like(h)),
    "minimum with one zero": lambda h: torch.minimum(h, torch.tensor(0.0)),
    "fmax with zeros of a shape": lambda h: torch.fmax(h, h.new_zeros(6)),
    "max of two": lambda h: torch.max(h, -0.1 * h),
    "min with zeros": lambda h: torch.min(h, torch.full((6,), 0.0)),
    "threshold": lambda h: F.threshold(h, 0, 0),
    "hardtanh(0, inf)": lambda h: F.hardtanh(h, 0.0, math.inf),
    "rrelu": lambda h: F.rrelu(h, training=False),
    "where(h > 0, h, 0.1 h)": lambda h: torch.where(h > 0, h, 0.1 * h),
    "where(h <= 0, 0, h)": lambda h: torch.where(h <= 0, 0.0, h),
    "where(h > 0, h, zeros)": lambda h: torch.where(h > 0, h, torch.zeros(())),
    "where(h > 0 and h < inf, h, 0)": lambda h: torch.where((h > 0) & (h < math.inf), h, 0.0),
    "where(h > -h, h, 0.1 h)": lambda h: torch.where(h > -h, h, 0.1 * h),
    "times whether it is positive": lambda h: h * (h > 0),
    "times a mask": lambda h: h * h.gt(0).to(h.dtype),
    "times its sign": lambda h: h * torch.sign(h),
    "masked_fill": lambda h: h.masked_fill(h < 0, 0.0),
    "masked_fill with zero": lambda h: h.masked_fill(h.lt(0), torch.tensor(0.0)),
    "the root of a square": lambda h: h.square().sqrt(),
    "a power of a power": lambda h: (h.abs() ** 0.5) ** 2,
    "the inverse of the inverse": lambda h: 1 / (1 / h),
    "the root against its inverse": lambda h: h * h.abs().sqrt() * h.abs().rsqrt(),
    "the largest of two samples": lambda h: torch.stack([h, h.flip(0)]).max(0).values,
    "the deviation of two samples": lambda h: torch.stack([h, h.flip(0)]).std(0),
    "the length of two samples": lambda h: torch.linalg.vector_norm(torch.stack([h, h.flip(0)]), dim=0),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_positive_factors(name):
    model = Between(KEEPING[name])
    assert powers(model, torch.randn(4, 4)) == {
        "first.weight": {"first.weight": [1], "first.bias": [1], "second.weight": [-1]}
    }
    assert change(model, ob.symmetry(model, torch.randn(4, 4), kinds="positive")) < 1e-9


CHANGING = {
    "clamp(min=0.5)": lambda h: h.clamp(min=0.5),
    "clamp(0, 1)": lambda h: h.clamp(0, 1),
    "clamp(min=ones)": lambda h: h.clamp(min=torch.ones(6)),
    "maximum with halves": lambda h: torch.maximum(h, torch.full_like(h, 0.5)),
    "max with a number": lambda h: torch.max(h, torch.tensor(0.5)),
    "threshold at 0.1": lambda h: F.threshold(h, 0.1, 0),
    "threshold to another number": lambda h: F.threshold(h, 0, 0.5),
    "hardtanh": lambda h: F.hardtanh(h, 0.0, 0.3),
    "where(h > 1, h, 0)": lambda h: torch.where(h > 1, h, 0.0),
    "where(h > 0, h, 1)": lambda h: torch.where(h > 0, h, 1.0),
    "where(h > 0, h, h^2)": lambda h: torch.where(h > 0, h, h * h),
    "where(h > h^2, h, 0)": lambda h: torch.where(h > h * h, h, 0.0),
    "compared with another unit": lambda h: torch.where(h > h.mean(-1, keepdim=True), h, 0.0),
    "masked_fill": lambda h: h.masked_fill(h < 0, 0.3),
    "whether it is above one": lambda h: h * (h > 1),
    "its root and itself": lambda h: h.abs().sqrt() + h,
    "a power that is no simple fraction": lambda h: h.abs() ** (1 / 3) + h.abs(),
    "the largest unit": lambda h: h / h.max(-1, keepdim=True).values,
    "the deviation of units": lambda h: h / h.std(-1, keepdim=True),
    "the variance of two samples": lambda h: h + torch.stack([h, h.flip(0)]).var(0),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_positive_factors_change(name):
    model = Between(CHANGING[name])
    assert powers(model, torch.randn(4, 4)) == {}
    scaled = ob.symmetry(Between(torch.relu), torch.randn(4, 4), kinds="positive")
    assert change(model, scaled) > 1e-3


SQUARE = {"first.weight": {"first.weight": [1], "first.bias": [1], "second.weight": [-2]}}


@pytest.mark.parametrize("between", [lambda h: torch.stack([h, h.flip(0)]).var(0), lambda h: (1 / h) ** -2])
def test_a_variance_has_twice_the_degree(between):
    model = Between(between)
    assert powers(model, torch.randn(4, 4)) == SQUARE
    assert change(model, ob.symmetry(model, torch.randn(4, 4), kinds="positive")) < 1e-9


def test_a_root_has_half_the_degree():
    model = Between(lambda h: h.abs().sqrt())
    assert powers(model, torch.randn(4, 4)) == {
        "first.weight": {"first.weight": [2], "first.bias": [2], "second.weight": [-1]}
    }
    assert change(model, ob.symmetry(model, torch.randn(4, 4), kinds="positive")) < 1e-9


def test_zeros_that_a_module_keeps_may_be_set_later():
    class Kept(Between):
        def forward(self, x):
            return self.second(torch.maximum(self.first(x), self.zero))

    model = Kept(None)
    model.zero = torch.zeros(())  # an attribute, which is in no state
    assert powers(model, torch.randn(4, 4)) == {}


def test_zeros_at_one_length_are_no_zeros():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            positions = torch.arange(x.shape[1]).to(x)
            return self.second(torch.maximum(self.first(x), positions[:, None]))

    assert powers(Counted(), torch.randn(2, 1, 4)) == {}


def test_zeros_in_an_exported_program():
    class Exported(Between):
        def forward(self, x):
            part = x[:, :0]  # a recording does not follow what is written through another view
            x[:, :0].zero_()
            return super().forward(x + part.sum())

    symmetry = ob.symmetry(Exported(KEEPING["maximum with zeros"]), torch.randn(4, 4), kinds="positive")
    assert [f.name for f in symmetry.front_ends] == ["export"]
    assert list(symmetry.scales) == ["first.weight"]


@pytest.mark.parametrize("name", ["maximum with zeros", "fmax with zeros of a shape"])
def test_zeros_on_the_meta_device(name):
    symmetry = ob.symmetry(Between(KEEPING[name]).to("meta"), torch.randn(4, 4, device="meta"), kinds="positive")
    assert list(symmetry.scales) == ["first.weight"]


def test_a_filter_before_a_batch_norm_and_the_unit_behind_it():
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3))
    symmetry = ob.symmetry(model, torch.randn(2, 2, 6, 6), kinds="positive")
    assert powers(model, torch.randn(2, 2, 6, 6)) == {
        "0.weight": {"0.weight": [1], "0.bias": [1], "1.running_mean": [1], "1.running_var": [2]},
        "1.weight": {"1.weight": [1], "1.bias": [1], "4.weight": [-1]},
    }
    assert symmetry.scales["0.weight"].offsets == {"1.running_var": model[1].eps}


def test_stored_statistics_of_instance_norms_have_no_scale():
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3)).eval()
    symmetry = ob.symmetry(model, torch.randn(2, 2, 6, 6), verify=False, kinds="positive")
    assert {name: sorted(scale.powers) for name, scale in symmetry.scales.items()} == {
        "1.weight": ["1.bias", "1.weight", "4.weight"]
    }


class Residual(nn.Module):
    """A stream that two maps write to, one of them behind a norm."""

    def __init__(self):
        super().__init__()
        self.read, self.conv = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.read(x).relu()
        return self.out((h + self.norm(self.conv(h))).relu())


def test_writers_of_a_stream_share_a_scale():
    assert powers(Residual(), torch.randn(5, 4)) == {
        "read.weight": {
            "read.weight": [1], "read.bias": [1], "norm.weight": [1], "norm.bias": [1],
            "conv.weight": [-1], "out.weight": [-1],
        },
        "conv.weight": {"conv.weight": [1], "norm.running_mean": [1], "norm.running_var": [2]},
    }  # fmt: skip


class Gated(nn.Module):
    """SwiGLU: what is multiplied can be scaled, and the gate cannot."""

    def __init__(self, gate):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False), nn.Linear(6, 2))
        self.function = gate

    def forward(self, x):
        return self.down(self.up(x) * self.function(self.gate(x)))


def test_a_product_adds_degrees():
    assert powers(Gated(F.silu), torch.randn(5, 4)) == {"up.weight": {"up.weight": [1], "down.weight": [-1]}}
    assert powers(Gated(F.relu), torch.randn(5, 4)) == {
        "up.weight": {"up.weight": [1], "down.weight": [-1]},
        "gate.weight": {"gate.weight": [1], "down.weight": [-1]},
    }
    assert powers(Gated(lambda x: x.relu().square()), torch.randn(5, 4))["gate.weight"] == {
        "gate.weight": [1], "down.weight": [-2],
    }  # fmt: skip


class Heads(nn.Module):
    """Attention in heads: queries against keys, values against the output."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=bias) for bias in (True, False, True, True))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_heads():
    symmetry = ob.symmetry(Heads(), torch.randn(2, 3, 8), kinds="positive")
    found = sorted((sorted(s.powers), symmetry.groups[s.group].parents != ()) for s in symmetry.scales.values())
    assert found == [(["k.weight", "q.bias", "q.weight"], True), (["o.weight", "v.bias", "v.weight"], True)]


class Experts(nn.Module):
    """Experts of ReLU units; each may have a number that its units share."""

    def __init__(self, has_gates):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6, 2))
        self.gates = nn.Parameter(torch.randn(3)) if has_gates else None

    def forward(self, x):
        hidden = torch.einsum("bd,edh->ebh", x, self.up).relu()
        hidden = hidden if self.gates is None else hidden * self.gates[:, None, None]
        return torch.einsum("ebh,ehd->bd", hidden, self.down)


def test_experts_beside_another_axis_than_their_units():
    """A scale of experts that those of their units make up is none of its own; one with a gate is, in front or behind."""
    assert powers(Experts(has_gates=False), torch.randn(5, 4)) == {"up:2": {"up": [1], "down": [-1]}}
    assert powers(Experts(has_gates=True), torch.randn(5, 4)) == {
        "up": {"up": [1], "gates": [-1]},
        "up:2": {"up": [1], "down": [-1]},
    }


class Trap(nn.Module):
    """One hidden layer of ReLU units whose results are read in a way that a scale would change."""

    def __init__(self, read):
        super().__init__()
        self.fc1, self.fc2, self.read = nn.Linear(4, 6), nn.Linear(6, 2), read

    def forward(self, x):
        return self.read(self, self.fc1(x).relu())


TRAPS = {
    "a number is added": lambda m, h: m.fc2(h + 1),
    "units are summed": lambda m, h: m.fc2(h) + h.sum(-1, keepdim=True),
    "a square beside the unit": lambda m, h: m.fc2(h + h * h),
    "clipped": lambda m, h: m.fc2(h.clamp(max=1.0)),
    "far clipped": lambda m, h: m.fc2(h.clamp(max=1e6)),
    "compared with a number": lambda m, h: m.fc2(torch.where(h > 1, h, torch.zeros_like(h))),
    "normalised": lambda m, h: m.fc2(F.layer_norm(h, (6,))),
    "softmax over units": lambda m, h: m.fc2(h.softmax(-1)),
    "the unit beside its root": lambda m, h: m.fc2(h + (h + 1e-3).sqrt()),
    "returned": lambda m, h: (m.fc2(h), h),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name):
    scales = ob.symmetry(Trap(TRAPS[name]), torch.randn(5, 4), kinds="positive").scales
    assert "fc1.weight" not in scales


class Shuffled(nn.Module):
    """The channels of two layers, shuffled and cut into halves of which one is read with a scale and one without."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.read, self.tanh = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        mixed = torch.stack([self.a(x), self.b(x)], -1).flatten(1)
        first, second = mixed.chunk(2, -1)
        return self.read(first.relu()) + self.tanh(second.tanh())


def test_shuffled_channels_are_not_taken_for_others():
    symmetry = ob.symmetry(Shuffled(), torch.randn(5, 4), verify=False, kinds="positive")
    model = Shuffled().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    moved = ob.Transform.random(symmetry, torch.Generator().manual_seed(0)).apply(model)
    torch.testing.assert_close(torch.func.functional_call(model, moved, (x,)), model(x), rtol=1e-9, atol=1e-11)
