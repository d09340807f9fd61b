"""Channels meet, within groups if there are any; positions stay where they are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.cases import Fn, check_groups, image, weight, written


def network(middle: nn.Module, num_in: int, num_out: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, num_in, 3), nn.Tanh(), middle, nn.Tanh(), nn.Conv2d(num_out, 2, 1))


# A forward, and the sizes of the groups that a person counts.
CASES = [
    (lambda self, x: F.conv1d(self.first(x)[:, :, None], self.last.weight[:, :, None]), [8]),
    (lambda self, x: self.last(F.conv1d(self.first(x)[:, :, None], self.scale.view(8, 1, 1), groups=8)[:, :, 0]), [8]),
    (lambda self, x: F.conv1d(self.first(x)[:, None], self.scale.view(1, 1, 8)), []),  # units are positions
    (lambda self, x: self.last(self.first(x).unfold(0, 2, 1).sum(-1)), [8]),
    (lambda self, x: self.last(self.first(x).unfold(1, 1, 1)[..., 0]), []),
]


@pytest.mark.parametrize(("forward", "sizes"), CASES)
def test_groups(forward, sizes):
    check_groups(forward, sizes)


@pytest.mark.parametrize(
    ("middle", "num_in", "num_out", "groups"),
    [
        (nn.Conv2d(6, 5, 3), 6, 5, ["5", "6"]),
        (nn.Conv2d(6, 4, 3, groups=2), 6, 4, ["2", "2[2]", "3[2]"]),
        (nn.Conv2d(6, 6, 3, groups=6), 6, 6, ["6"]),
        (nn.ConvTranspose2d(6, 5, 2), 6, 5, ["5", "6"]),
        (nn.ConvTranspose2d(6, 4, 2, groups=2), 6, 4, ["2", "2[2]", "3[2]"]),
        (nn.PixelShuffle(2), 12, 3, ["3"]),
        (nn.PixelUnshuffle(2), 5, 20, ["5"]),
    ],
)
def test_channels_move(middle, num_in, num_out, groups):
    assert written(network(middle, num_in, num_out), image()()) == groups


@pytest.mark.parametrize(("kernel", "groups"), [(1, ["3", "5", "6"]), (3, ["3", "5"])])
def test_positions_move_only_under_a_kernel_of_one(kernel, groups):
    def forward(self, x):
        return torch.sin(self.conv(self.table[None])).sum(2) @ self.out * x

    torch.manual_seed(0)
    members = {"table": weight(5, 6), "conv": nn.Conv1d(5, 3, kernel, padding=kernel // 2), "out": weight(3, 4)}
    assert written(Fn(forward, **members)) == groups


def test_windows_as_columns_keep_their_channels():
    def forward(self, x):
        columns = F.unfold(torch.tanh(self.first(x)), 2, stride=2)
        return self.last(F.fold(torch.tanh(columns), 8, 2, stride=2))

    torch.manual_seed(0)
    assert written(Fn(forward, first=nn.Conv2d(3, 5, 1), last=nn.Conv2d(5, 2, 1)), image()()) == ["5"]
