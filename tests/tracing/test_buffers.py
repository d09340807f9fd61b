"""Buffers of the state move like parameters; tables that are read by position, and what is not in the state, do not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import onebasin as ob
from tests.cases import Fn, two_layers


def trace(model: nn.Module, inputs: Tensor) -> ob.Symmetry:
    """Trace without verification, then verify."""
    symmetry = ob.symmetry(model, inputs, verify=False)
    assert symmetry.verify(model, inputs) < 1e-9
    ob.symmetry(model, inputs)
    return symmetry


def sizes(symmetry: ob.Symmetry) -> list[int]:
    return sorted(group.size for group in symmetry.groups.values())


def scaled(self, x):
    """A norm whose statistics and weights are all buffers."""
    scale = (self.weight * (self.variance + 1e-5).rsqrt()).reshape(1, -1)
    return self.last((self.first(x) - self.mean) * scale)


def test_a_frozen_norm_moves():
    buffers = {name: torch.rand(8) for name in ("weight", "mean", "variance")}
    symmetry = trace(two_layers(scaled, **buffers), torch.rand(3, 4))
    assert sizes(symmetry) == [8]
    assert all(symmetry.layouts[name] == symmetry.layouts["first.bias"] for name in buffers)


def test_buffers_of_ones_and_zeros_are_no_constants():
    buffers = {"weight": torch.ones(8), "mean": torch.zeros(8), "variance": torch.ones(8)}
    symmetry = ob.symmetry(two_layers(scaled, **buffers), torch.rand(3, 4), verify=False)
    assert sizes(symmetry) == [8]
    assert all(symmetry.layouts[name] == symmetry.layouts["first.bias"] for name in buffers)


@pytest.mark.parametrize("normalise", [spectral_norm, parametrizations.spectral_norm])
def test_vectors_of_spectral_norm_move(normalise):
    symmetry = trace(nn.Sequential(nn.Linear(4, 8), normalise(nn.Linear(8, 6)), nn.Linear(6, 2)).eval(), torch.rand(3, 4))
    assert sizes(symmetry) == [6, 8]
    moved = [key for key, layout in symmetry.layouts.items() if key.endswith(("_u", "_v")) and layout[0].name]
    assert len(moved) == 2


def test_masks_of_pruned_weights_move():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    prune.random_unstructured(model[0], "weight", 0.5)
    symmetry = trace(model, torch.rand(3, 4))
    assert sizes(symmetry) == [8]
    assert symmetry.layouts["0.weight_mask"] == symmetry.layouts["0.weight_orig"]


def test_statistics_that_are_also_read_elsewhere_move():
    def forward(self, x):
        return self.last(self.norm(self.first(x)) + self.norm.running_mean)

    assert sizes(trace(two_layers(forward, norm=nn.BatchNorm1d(8)), torch.rand(3, 4))) == [8]


def test_random_features_move():
    def forward(self, x):
        return self.last(torch.sin(x @ self.directions))

    assert sizes(trace(Fn(forward, directions=torch.randn(4, 8), last=nn.Linear(8, 2)), torch.rand(3, 4))) == [8]


@pytest.mark.parametrize(
    "read",
    [
        lambda table, length: table[:length],
        lambda table, length: table[torch.arange(length)],
        lambda table, length: table.unsqueeze(0).to(torch.float64).narrow(1, 0, length).squeeze(0).float(),
    ],
)
def test_a_table_that_is_read_by_position_is_fixed(read):
    """It may be made anew for longer inputs, in its own order."""

    def forward(self, x):
        return self.last(self.first(x) * read(self.table, len(x)))

    symmetry = ob.symmetry(two_layers(forward, table=torch.randn(16, 8)), torch.rand(3, 4), verify=False)
    assert not symmetry.groups
    assert symmetry.pinned["table", 1].reason == "a buffer that is read in part, by position"


def test_buffers_that_are_not_in_the_state_are_fixed():
    model = two_layers(lambda self, x: self.last(self.first(x) * self.scale))
    model.register_buffer("scale", torch.rand(8), persistent=False)
    assert not ob.symmetry(model, torch.rand(3, 4), verify=False).groups


def test_buffers_of_integers_are_fixed():
    model = two_layers(lambda self, x: self.last(self.first(x) * self.scale), scale=torch.ones(8, dtype=torch.int64))
    symmetry = ob.symmetry(model, torch.rand(3, 4), verify=False)
    assert not symmetry.groups
    assert symmetry.pinned["scale", 0].reason == "a buffer of integers"


def test_a_buffer_that_only_one_of_two_calls_reads_by_position_is_fixed():
    def forward(self, x, short: bool = False):
        return self.last(self.first(x) * (self.table[:3].sum(0) if short else self.table.sum(0)))

    model = two_layers(forward, table=torch.randn(5, 8))
    calls = [(torch.rand(3, 4),), (torch.rand(3, 4), True)]
    assert sizes(ob.symmetry(model, calls[0])) == [5, 8]
    assert not ob.symmetry(model, calls, verify=False).groups


def test_a_codebook_that_is_a_buffer_moves():
    """It is read in part, but at positions that are found by comparing its codes."""

    def forward(self, x):
        return self.last(self.codes[torch.cdist(self.first(x), self.codes).argmin(1)])

    members = {"first": nn.Linear(4, 6), "codes": torch.randn(7, 6), "last": nn.Linear(6, 2)}
    assert sizes(trace(Fn(forward, **members), torch.rand(3, 4))) == [6, 7]
