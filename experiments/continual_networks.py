"""The networks of the continual-learning table."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import onebasin as ob


class Standardize(nn.Module):
    """Subtract the mean of a data set's pixels and divide by their deviation, a channel at a time."""

    def __init__(self, means: tuple[float, ...], deviations: tuple[float, ...]):
        super().__init__()
        self.register_buffer("means", torch.tensor(means).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviations", torch.tensor(deviations).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W), from 0 to 1."""
        return (images - self.means) / self.deviations


def make_mlp(num_hidden: int = 1, width: int = 256) -> nn.Module:
    """The paper's network for Rotated MNIST: one hidden layer by its appendix and code, two by its main text."""
    layers: list[nn.Module] = [Standardize((0.1307,), (0.3081,)), nn.Flatten()]
    for i, o in itertools.pairwise([784, *[width] * num_hidden]):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_dropout(probability: float) -> nn.Module:
    """A layer of dropout, or one that does nothing and draws no random numbers."""
    return nn.Dropout(probability) if probability else nn.Identity()


class StackedMLP(nn.Module):
    """Several networks of `make_mlp` in one, trained together: example j of a batch is for network j % members.

    Their hidden units may have dropout.
    """

    def __init__(self, networks: Sequence[nn.Module], dropout: float = 0.0):
        super().__init__()
        self.dropout = make_dropout(dropout)
        layers = [[layer for layer in network.modules() if isinstance(layer, nn.Linear)] for network in networks]
        self.standardize = Standardize((0.1307,), (0.3081,))
        together = list(zip(*layers, strict=True))
        self.weights = nn.ParameterList([torch.stack([layer.weight.detach() for layer in same]) for same in together])
        self.biases = nn.ParameterList([torch.stack([layer.bias.detach() for layer in same]) for same in together])

    def forward(self, images: Tensor) -> Tensor:
        """Images (N * members, 1, 28, 28) to logits."""
        x = self.standardize(images).view(-1, len(self.weights[0]), 784).transpose(0, 1)  # (members, N, pixels)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias.unsqueeze(1), self.dropout(torch.relu(x)) if number else x, weight.transpose(1, 2))
        return x.transpose(0, 1).reshape(len(images), -1)

    def symmetry(self) -> ob.Symmetry:
        """A permutation of its own for each member's hidden layers."""
        axes, last = {}, len(self.weights) - 1
        for i in range(last + 1):
            units = f"h{i}" if i < last else "o"
            axes[f"weights.{i}"] = f"e {units} {f'h{i - 1}' if i else 'i'}"
            axes[f"biases.{i}"] = f"e {units}"
        return ob.Symmetry.from_axes(axes, free=[f"h{i}[e]" for i in range(last)], model=self)


class Block(nn.Module):
    """Two convolutions with batch norm around a shortcut, and possibly dropout between them."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = make_dropout(dropout)
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_inputs != num_outputs:
            projection = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Images to images, half as large if the stride is two."""
        y = self.norm2(self.conv2(self.dropout(torch.relu(self.norm1(self.conv1(x))))))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32 x 32 images with a third of the usual channels, as in the MC-SGD and Stable SGD papers.

    Its heads are one layer of 100 outputs, of which a task sees its own.
    """

    def __init__(self, channels: int = 20, num_classes: int = 100, dropout: float = 0.0):
        super().__init__()
        self.standardize = Standardize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        widths = [channels, channels, 2 * channels, 4 * channels, 8 * channels]
        blocks: list[nn.Module] = []
        for stage, (i, o) in enumerate(itertools.pairwise(widths)):
            blocks += [Block(i, o, 2 if stage else 1, dropout), Block(o, o, 1, dropout)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 3, 32, 32), from 0 to 1, to 100 logits."""
        x = torch.relu(self.norm(self.stem(self.standardize(images))))
        return self.head(self.blocks(x).mean((2, 3)))
