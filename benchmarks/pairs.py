"""Trained pairs for `benchmarks.align`: two networks from different starts, and the data they were trained on.

The digits come with the package. MNIST and CIFAR-10 are read from ``--data`` or ``ONEBASIN_DATA``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin import datasets
from onebasin.cli.digits_demo import ResidualCNN, train


@dataclass
class Pair:
    """Two trained networks, batches of training data, and test data to judge by."""

    target: nn.Module
    source: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]

    def evaluate(self, model: nn.Module) -> float:
        """The loss on the test data."""
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self.test[0]), self.test[1]))


def _make_mlp(num_inputs: int) -> nn.Module:
    widths = [num_inputs, 512, 512, 10]
    layers = [layer for n, m in itertools.pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _make_vgg(factor: int) -> nn.Module:
    """VGG11 without batch norm, for images of 32 x 32; its full width is a factor of four."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ((16,), (32,), (64, 64), (128, 128), (128, 128)):
        for width in (factor * each for each in stage):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def _digits(split: Any) -> tuple[Tensor, Tensor]:
    return datasets.digits(split)


def _mnist(split: Any) -> tuple[Tensor, Tensor]:
    images, labels = datasets.mnist(split)
    return ((images.float() / 255 - 0.1307) / 0.3081)[:10000], labels[:10000]


def _cifar(split: Any) -> tuple[Tensor, Tensor]:
    images, labels = datasets.cifar10(split)
    return ((images.float() / 255 - 0.4734) / 0.2516)[:10000], labels[:10000]


@dataclass(frozen=True)
class Recipe:
    """How a pair is made: a network, data, epochs and step of Adam."""

    make: Callable[[], nn.Module]
    read: Callable[[Any], tuple[Tensor, Tensor]]
    epochs: int
    lr: float
    needs_data: bool = True


PAIRS: dict[str, Recipe] = {
    "MLP 2 x 512, digits": Recipe(lambda: _make_mlp(64), _digits, 20, 1e-3, needs_data=False),
    "residual CNN, digits": Recipe(ResidualCNN, _digits, 20, 5e-3, needs_data=False),
    "MLP 2 x 512, MNIST": Recipe(lambda: _make_mlp(784), _mnist, 5, 1e-3),
    "VGG11 / 4, CIFAR-10": Recipe(lambda: _make_vgg(1), _cifar, 8, 1e-3),
    "VGG11, CIFAR-10": Recipe(lambda: _make_vgg(4), _cifar, 8, 3e-4),
}


def train_pair(name: str, path: Path, device: str = "cpu") -> None:
    """Train two networks and store them with their data."""
    recipe = PAIRS[name]
    (x, y), test = recipe.read("train"), recipe.read("test")
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = train(recipe.make().to(device), x.to(device), y.to(device), seed, recipe.epochs, recipe.lr)
        states.append({key: value.cpu() for key, value in model.state_dict().items()})
    torch.save({"states": states, "train": (x, y), "test": test}, path)


def load_pair(name: str, path: Path, device: str, batch: int = 1000) -> Pair:
    """What `train_pair` stored."""
    stored = torch.load(path, weights_only=True)
    networks = []
    for state in stored["states"]:
        network = PAIRS[name].make()
        network.load_state_dict(state)
        networks.append(network.eval().to(device))
    x, y = (tensor.to(device) for tensor in stored["train"])
    test = tuple(tensor.to(device) for tensor in stored["test"])
    return Pair(networks[0], networks[1], list(zip(x.split(batch), y.split(batch), strict=True)), (test[0], test[1]))
