"""Networks and tasks small enough for tests."""

import torch
from torch import nn

from onebasin.continual import Task

TRAINING = {"batch_size": 20, "epochs": 2}


def make_mlp(seed: int = 0, width: int = 12) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def make_task(seed: int, classes: tuple[int, ...] = (0, 1, 2, 3), count: int = 80, heads: bool = False) -> Task:
    """Clusters at random places, one per class."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor(classes)[torch.arange(count) % len(classes)]
    centres = 2 * torch.randn(4, 6, generator=generator)
    inputs = centres[targets] + 0.5 * torch.randn(count, 6, generator=generator)
    return Task(inputs, targets, classes if heads else None)
