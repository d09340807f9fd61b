"""Bad input, what cannot be traced, and the self-check."""

import dataclasses

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.programs.calls import read_calls
from onebasin.programs.exporting import export
from onebasin.symmetries.layout import Factor
from onebasin.symmetries.verification import verify_programs
from onebasin.tensors.states import read_state
from onebasin.tracing import symmetry as trace


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        (lambda x: x, torch.ones(1), TypeError, "expected a torch.nn.Module, got function"),
        (small(), None, TypeError, "must be a tensor, a tuple of positional arguments, a dict"),
        (small(), "text", TypeError, "got str"),
        (small(), [], ValueError, "example_inputs is empty"),
        (small(), torch.ones(1, 5), ValueError, "cannot trace Sequential with these example inputs"),
        (small(), (torch.ones(1, 4), torch.ones(1)), ValueError, "cannot trace Sequential"),
    ],
)
def test_bad_input(model, inputs, error, message):
    with pytest.raises(error, match=message):
        ob.symmetry(model, inputs)


def test_shared_memory_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    buffer = torch.zeros(24)
    model[0].weight.data = buffer[:16].view(4, 4)
    model[1].weight.data = buffer[8:].view(4, 4)
    with pytest.raises(ValueError, match="share part of their memory"):
        ob.symmetry(model, torch.ones(1, 4))


def test_meta_device_reads_shapes_only():
    with torch.device("meta"):
        model = small()
    expected = ob.symmetry(small(), torch.ones(3, 4))
    found = ob.symmetry(model, torch.ones(3, 4, device="meta"))
    assert found.groups == expected.groups
    assert found.layouts == expected.layouts
    moved = found.random().apply(model)
    assert all(value.is_meta for value in moved.values())
    with pytest.raises(ValueError, match="meta device has no values"):
        found.verify(model, torch.ones(3, 4, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_dtype(dtype):
    """Verification runs in float64 whatever the model's type, and so does not fail for rounding."""
    model = small().to(dtype)
    assert len(ob.symmetry(model, torch.rand(3, 4, dtype=dtype)).groups) == 2
    assert all(p.dtype == dtype for p in model.parameters())


class LowPrecisionInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.a(x).to(torch.bfloat16).float()
        return self.b(h.half().to(dtype=torch.float32) + torch.full((8,), 0.5, dtype=torch.float16).float())


def test_casts_inside_are_promoted():
    model = LowPrecisionInside()
    symmetry = ob.symmetry(model, torch.rand(3, 4))
    assert len(symmetry.groups) == 1
    assert symmetry.verify(model, torch.rand(3, 4)) < 1e-12


def test_verification_names_the_group_to_blame():
    """A symmetry that forgets the statistics of a batch norm, the classic mistake."""
    model = small()
    inputs = torch.rand(3, 4)
    right = ob.symmetry(model, inputs)
    wrong = dataclasses.replace(right, layouts={**right.layouts, "3.running_mean": (Factor(6),)})
    calls = read_calls(inputs)
    programs = [export(model, call) for call in calls]
    state = read_state(model)
    assert verify_programs(right, programs, state) < 1e-12
    with pytest.raises(ValueError, match=r"permuting changes the function on random weights by .*: '2.weight'"):
        verify_programs(wrong, programs, state)
    assert wrong.verify(model, inputs) < 1e-12  # a fresh norm hides it
    model[3].running_mean.uniform_(-2, -1)
    with pytest.raises(ValueError, match=r"'2.weight'"):
        wrong.verify(model, inputs)


@pytest.mark.parametrize("seed", range(4))
def test_small_groups_are_not_right_by_chance(seed):
    """Half of all permutations of two units are the identity."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    axes = {"0.weight": "a i", "0.bias": "a", "2.weight": "b a", "2.bias": "b", "4.weight": "o a", "4.bias": "o"}
    wrong = ob.Symmetry.from_axes(axes, free=["a", "b"])
    with pytest.raises(ValueError, match="permuting changes the function"):
        wrong.verify(model, torch.rand(5, 3))


def test_several_calls_meet_in_one_symmetry():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode, self.spare = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(2, 2)

        def forward(self, x=None, z=None):
            return self.encode(x).relu() if z is None else self.decode(z.relu())

    model = Two()
    only = ob.symmetry(model, {"x": torch.rand(1, 4)})
    assert only.unreached == ("decode.weight", "decode.bias", "spare.weight", "spare.bias")
    both = ob.symmetry(model, [{"x": torch.rand(1, 4)}, {"z": torch.rand(1, 8)}])
    assert both.unreached == ("spare.weight", "spare.bias")
    assert not both.groups


def test_trace_is_exported_under_its_public_name():
    assert ob.symmetry is trace
