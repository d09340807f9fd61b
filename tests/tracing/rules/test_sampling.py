"""Reads at coordinates pin positions and keep channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onebasin as ob
from tests.cases import Fn, check_groups, weight


def test_a_spatial_transformer_is_free():
    def forward(self, x):
        h = torch.relu(self.conv(x))
        grid = F.affine_grid(self.where(h.mean((2, 3))).view(-1, 2, 3), list(h.shape), align_corners=False)
        return self.last(F.grid_sample(h, grid, align_corners=False).flatten(1))

    model = Fn(forward, conv=nn.Conv2d(3, 5, 3), where=nn.Linear(5, 6), last=nn.Linear(5 * 36, 2))
    symmetry = ob.symmetry(model, torch.rand(2, 3, 8, 8), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [5]
    assert symmetry.verify(model, torch.rand(2, 3, 8, 8)) < 1e-9


def test_sampled_points_move_with_what_makes_them():
    """Points of deformable attention: each reads a place of its own, and they are summed with learned weights."""

    def forward(self, x):
        points = self.offsets(x.mean((2, 3))).view(2, 4, 1, 2)
        return self.last((F.grid_sample(self.conv(x), points, align_corners=False)[..., 0] * self.shares).sum(2))

    members = {"conv": nn.Conv2d(3, 5, 3), "offsets": nn.Linear(3, 8), "shares": weight(4), "last": nn.Linear(5, 2)}
    model = Fn(forward, **members)
    symmetry = ob.symmetry(model, torch.rand(2, 3, 8, 8), verify=False)
    assert sorted(group.size for group in symmetry.groups.values()) == [4, 5]
    assert symmetry.verify(model, torch.rand(2, 3, 8, 8)) < 1e-9


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_keep_their_units(mode):
    model = nn.Sequential(nn.EmbeddingBag(10, 8, mode=mode), nn.Linear(8, 2))
    symmetry = ob.symmetry(model, torch.arange(6).view(2, 3), verify=False)
    assert [group.size for group in symmetry.groups.values()] == [8]
    assert symmetry.verify(model, torch.arange(6).view(2, 3)) < 1e-9


def test_volumes_are_sampled_too():
    def forward(self, x):
        h = self.first(x).T.reshape(1, 8, 3, 1, 1).expand(1, 8, 3, 2, 2)
        return self.last(F.grid_sample(h, torch.zeros(1, 1, 1, 1, 3), align_corners=False).flatten(1))

    check_groups(forward, [8])
