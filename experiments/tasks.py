"""What networks are trained on, and how: all networks of a table at once, as one batch under `torch.func.vmap`."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from experiments.frame import identify
from onebasin import datasets
from onebasin.tensors.files import write_atomically

Stack = dict[str, Tensor]
"""The state of many networks of one architecture, stacked along a first axis."""


class Data(NamedTuple):
    """Inputs and targets."""

    x: Tensor
    y: Tensor

    def to(self, device: str) -> Data:
        """The same on another device."""
        return Data(self.x.to(device), self.y.to(device))

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Cut in order."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


@dataclass(frozen=True)
class Task:
    """A data set, with the networks of Table 2 and their training.

    Attributes:
        name: of the paper's column.
        widths: of the network's layers, input and output included.
        activation: between the layers.
        loss: ``loss(output, target)``.
        lr: of Adam.
        epochs: over the training data.
        batch: examples a step.
        num_train: examples to train on, the first ones; the next 1,000 validate (polynomials have 100 of each).
    """

    name: str
    widths: tuple[int, ...]
    activation: type[nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    lr: float
    epochs: int
    batch: int
    num_train: int = 100

    @property
    def is_classification(self) -> bool:
        """Whether accuracy means something."""
        return self.loss is nn.functional.cross_entropy

    def widened(self, width: int) -> Task:
        """The same task with hidden layers of another width."""
        return replace(self, widths=(self.widths[0], *[width] * (len(self.widths) - 2), self.widths[-1]))

    def make_model(self) -> nn.Module:
        """A network with random weights, from torch's global generator."""
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(self.widths):
            layers += [nn.Linear(i, o), self.activation()]
        return nn.Sequential(*layers[:-1])


# Chosen so that the barriers of naive interpolation and of weight matching both fall near the paper's; docs/reproduction.md
# has what else was tried.
TASKS = {
    "Pol1": Task("Pol1", (1, 10, 10, 1), nn.Tanh, nn.functional.mse_loss, lr=0.02, epochs=300, batch=100),
    "Pol3": Task("Pol3", (1, 10, 10, 1), nn.Tanh, nn.functional.mse_loss, lr=0.02, epochs=300, batch=100),
    "MNIST": Task("MNIST", (784, 64, 64, 10), nn.ReLU, nn.functional.cross_entropy, 1e-3, 20, 100, 9_000),
    "CIFAR-10": Task("CIFAR-10", (3072, 64, 64, 10), nn.ReLU, nn.functional.cross_entropy, 1e-2, 10, 500, 45_000),
}
# y on an interval of x, with noise of standard deviation 0.05: the paper's protocol.
POLYNOMIALS: Mapping[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "Pol1": (lambda x: x + 3, -4.0, -2.0),
    "Pol3": (lambda x: (x - 3) ** 3, 2.0, 4.0),
}
NUM_VALIDATION = 1000


@functools.cache
def load(task: Task, split: str) -> Data:
    """The data of a task: "train", "validation" (never trained on; what is tuned is tuned on it) or "test"."""
    if task.name in POLYNOMIALS:
        function, low, high = POLYNOMIALS[task.name]
        generator = torch.Generator().manual_seed(["train", "validation", "test"].index(split))
        x = torch.rand(task.num_train, 1, generator=generator) * (high - low) + low
        return Data(x, function(x) + 0.05 * torch.randn(x.shape, generator=generator))
    seen = _read(task.name, "train")[0][: task.num_train].float()
    images, labels = _read(task.name, "test" if split == "test" else "train")
    first = task.num_train if split == "validation" else 0
    last = {"train": task.num_train, "validation": task.num_train + NUM_VALIDATION, "test": len(images)}[split]
    return Data((images[first:last].flatten(1).float() - seen.mean()) / seen.std(), labels[first:last])


@functools.cache
def _read(name: str, split: Any) -> tuple[Tensor, Tensor]:
    return {"MNIST": datasets.mnist, "CIFAR-10": datasets.cifar10}[name](split)


def trained_networks(task: Task, seeds: list[int], device: str) -> Stack:
    """`train_networks`, or what an earlier call with the same arguments has stored under ``experiments-output``."""
    described = {key: getattr(value, "__name__", value) for key, value in {**vars(task), "seeds": seeds}.items()}
    path = Path("experiments-output/networks", f"{hashlib.sha256(identify(described).encode()).hexdigest()[:16]}.pt")
    if not path.is_file():
        stack = train_networks(task, seeds, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: torch.save({k: v.cpu() for k, v in stack.items()}, file))
    return {key: value.to(device) for key, value in torch.load(path, weights_only=True).items()}


def train_networks(task: Task, seeds: list[int], device: str) -> Stack:
    """Train a network for every seed, all in one batch; each has its own start and sees its own order of the data."""
    modules = []
    for seed in seeds:
        torch.manual_seed(seed)
        modules.append(task.make_model())
    stack = {key: value.detach().to(device).requires_grad_() for key, value in stack_module_state(modules)[0].items()}
    template = modules[0].to("meta")
    optimizer = torch.optim.Adam(list(stack.values()), lr=task.lr)
    data = load(task, "train").to(device)

    def loss_of(params: Stack, index: Tensor) -> Tensor:
        return task.loss(functional_call(template, params, (data.x[index],)), data.y[index])

    losses = vmap(loss_of)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(task.epochs):
        orders = torch.stack([torch.randperm(len(data.x), generator=g) for g in generators]).to(device)
        for index in orders.split(task.batch, dim=1):
            optimizer.zero_grad()
            losses(stack, index).sum().backward()
            optimizer.step()
    return {key: value.detach() for key, value in stack.items()}
