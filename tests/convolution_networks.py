"""Tiny networks of convolutions and norms."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import Case, Fn, flat, image


def inverted_residual(m, x):
    x = m.norm(m.stem(x))
    h = F.hardswish(m.depthwise(F.relu6(m.expand(x))))
    scale = torch.sigmoid(m.excite(torch.relu(m.squeeze(F.adaptive_avg_pool2d(h, 1)))))
    x = x + m.project(h * scale)
    return m.head(x.mean((2, 3)))


CONVOLUTION: dict[str, Case] = {
    # convolutions
    "vgg with flatten": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 4, 12),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(12, 5),
        ),
        image(),
        ["12", "6", "8"],
    ),
    "conv auto-encoder": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 3, 2, 2),
        ),
        image(),
        ["6", "6", "8"],
    ),
    "square transposed conv": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Tanh(), nn.ConvTranspose2d(6, 6, 2, 2), nn.Tanh(), nn.Conv2d(6, 3, 1)),
        image(),
        ["6", "6"],
    ),
    "conv1d and conv3d": Case(
        lambda: Fn(
            lambda m, x, y: m.b(m.a(x).relu()) + m.d(m.c(y).relu()).mean((3, 4)),
            a=nn.Conv1d(3, 6, 3),
            b=nn.Conv1d(6, 2, 1),
            c=nn.Conv3d(1, 5, 2),
            d=nn.Conv3d(5, 2, 1),
        ),
        lambda: (torch.randn(2, 3, 6), torch.randn(2, 1, 5, 4, 4)),
        ["5", "6"],
    ),
    "inverted residual with squeeze and excitation": Case(
        lambda: Fn(
            inverted_residual,
            stem=nn.Conv2d(3, 8, 3),
            norm=nn.BatchNorm2d(8),
            expand=nn.Conv2d(8, 16, 1),
            depthwise=nn.Conv2d(16, 16, 3, padding=1, groups=16),
            squeeze=nn.Conv2d(16, 4, 1),
            excite=nn.Conv2d(4, 16, 1),
            project=nn.Conv2d(16, 8, 1),
            head=nn.Linear(8, 2),
        ),
        image(),
        ["16", "4", "8"],
    ),
    "depthwise multiplier": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1)),
        image(),
        ["2[4]", "4"],
    ),
    "grouped conv": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 1)),
        image(),
        ["2", "4[2]", "6[2]"],
    ),
    "decoder from a vector": Case(
        lambda: Fn(lambda m, x: m.b(m.a(x).relu().view(-1, 6, 3, 3)), a=nn.Linear(4, 54), b=nn.ConvTranspose2d(6, 2, 2)),
        flat(),
        ["6"],
    ),
    "pixel shuffle": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(3, 2, 1)), image(), ["3"]
    ),
    # norms
    "batch norm 1d": Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), flat(), ["8"]
    ),
    "batch norm 2d": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)), image(), ["8"]
    ),
    "batch norm in place": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 2, 3)),
        image(),
        ["8"],
    ),
    "layer norm": Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)), flat(), ["8"]),
    "instance norm": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(8, 2, 3)
        ),
        image(),
        ["8"],
    ),
    "rms norm": Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.SiLU(), nn.Linear(8, 2)), flat(), ["8"]),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 3)), image(), ["2", "4[2]"]
    ),
    "weight norm": Case(
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
            nn.ReLU(),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)),
        ),
        flat(),
        ["8"],
    ),
}
