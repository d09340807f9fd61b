"""Scales that were found by hand for small networks, and traps that have none; what is found is verified in float64."""

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
