"""Streams of tasks: rotated images, and images split by class."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from onebasin import datasets


@dataclass(frozen=True)
class Task:
    """What a strategy learns from, or is examined on.

    Attributes:
        inputs: (N, ...), on any device; uint8 images are read as numbers from 0 to 1.
        targets: (N,), labels.
        classes: the labels that may be answered in this task, which makes these outputs a head of its own (task-incremental
            learning). None: all of them (domain- and class-incremental learning).
        name: for tables.
    """

    inputs: Tensor
    targets: Tensor
    classes: tuple[int, ...] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or not len(self.inputs):
            raise ValueError(
                f"a task needs as many targets as inputs, and at least one; it has {len(self.inputs)} inputs "
                f"and {len(self.targets)} targets"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device | str) -> Task:
        """The same task on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True)
class Stream:
    """Tasks that come one after the other.

    Attributes:
        train: what is learnt, in this order.
        test: for each task, what it is examined on.
        name: for tables.
    """

    train: Sequence[Task]
    test: Sequence[Task]
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test) or not len(self.train):
            raise ValueError(f"a stream needs a test for each task; it has {len(self.train)} and {len(self.test)}")

    def __len__(self) -> int:
        return len(self.train)

    def first(self, num_tasks: int) -> Stream:
        """The first tasks alone."""
        return replace(self, train=self.train[:num_tasks], test=self.test[:num_tasks])


class _Lazily(Sequence[Task]):
    """Tasks that are made each time they are asked for, so that twenty rotations of a data set need not be held at once."""

    def __init__(self, makers: Sequence[Callable[[], Task]]):
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> _Lazily: ...

    def __getitem__(self, index: int | slice) -> Task | _Lazily:
        return _Lazily(self._makers[index]) if isinstance(index, slice) else self._makers[index]()

    def __iter__(self) -> Iterator[Task]:
        return (make() for make in self._makers)


Images = tuple[Tensor, Tensor]
Root = str | os.PathLike[str] | None


def hold_out(images: Images, share: float = 0.1, seed: int = 0) -> tuple[Images, Images]:
    """Cut images and labels at random into those to learn from and those to choose settings on, never on test images."""
    inputs, targets = images
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).to(inputs.device)
    num_held = max(1, round(share * len(inputs)))
    held, kept = order[:num_held], order[num_held:]
    return (inputs[kept], targets[kept]), (inputs[held], targets[held])


def rotated(train: Images, test: Images, num_tasks: int = 20, degrees: float = 180.0, name: str = "rotated") -> Stream:
    """The same images in every task, turned clockwise by angles from 0 to `degrees` (domain-incremental).

    Args:
        train: images (N, C, H, W) and labels; the rotations are computed on their device, when a task is asked for.
        test: likewise; rotated once.
        num_tasks: angles, evenly spaced, both ends included.
        degrees: the last angle.
        name: for tables.
    """
    if num_tasks < 2:
        raise ValueError(f"a stream of rotations needs at least two tasks, got {num_tasks}")
    angles = [degrees * i / (num_tasks - 1) for i in range(num_tasks)]

    def make(images: Images, angle: float) -> Task:
        return Task(rotate(images[0], angle), images[1], name=f"{angle:.1f} degrees")

    return Stream(
        _Lazily([lambda angle=angle: make(train, angle) for angle in angles]), [make(test, a) for a in angles], name
    )


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images (N, C, H, W) clockwise about their centre, bilinearly, black outside; in their own dtype and device."""
    if degrees == 0:
        return images
    angle = math.radians(degrees)
    # From where each output pixel is read: the inverse rotation, with the vertical axis pointing down.
    matrix = torch.tensor([[math.cos(angle), math.sin(angle), 0], [-math.sin(angle), math.cos(angle), 0]])
    parts = []
    for part in images.split(10_000):
        grid = functional.affine_grid(
            matrix.to(images.device).expand(len(part), -1, -1), list(part.shape), align_corners=False
        )
        turned = functional.grid_sample(part.float(), grid, align_corners=False)
        parts.append(turned.to(part.dtype) if part.is_floating_point() else turned.round_().clamp_(0, 255).to(part.dtype))
    return torch.cat(parts)


def split(
    train: Images, test: Images, num_tasks: int, heads: bool = True, seed: int | None = None, name: str = "split"
) -> Stream:
    """Each task has classes of its own.

    Args:
        train: inputs and labels.
        test: likewise.
        num_tasks: must divide the number of classes.
        heads: whether a task is told its classes, in training and in the examination (task-incremental), or not
            (class-incremental).
        seed: shuffles the classes; None keeps their order.
        name: for tables.
    """
    labels = train[1].unique().cpu()
    if len(labels) % num_tasks:
        raise ValueError(f"{len(labels)} classes cannot be split evenly into {num_tasks} tasks")
    if seed is not None:
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    parts = labels.view(num_tasks, -1)

    def make(images: Images, part: Tensor) -> Task:
        chosen = torch.isin(images[1], part.to(images[1].device))
        classes = tuple(sorted(part.tolist()))
        title = "classes " + ", ".join(map(str, classes))
        return Task(images[0][chosen], images[1][chosen], classes if heads else None, title)

    return Stream([make(train, part) for part in parts], [make(test, part) for part in parts], name)


def rotated_digits(num_tasks: int = 5, degrees: float = 180.0) -> Stream:
    """The embedded 8 x 8 digits, rotated: for tests and examples."""
    return rotated(datasets.digits("train"), datasets.digits("test"), num_tasks, degrees, "rotated digits")


def split_digits(num_tasks: int = 5, heads: bool = True) -> Stream:
    """The embedded 8 x 8 digits, two classes a task."""
    return split(datasets.digits("train"), datasets.digits("test"), num_tasks, heads, name="split digits")


def rotated_mnist(
    num_tasks: int = 20, root: Root = None, validation: bool = False, device: torch.device | str = "cpu"
) -> Stream:
    """MNIST turned by angles from 0 to 180 degrees: 60,000 images a task, always the same ten classes.

    Args:
        num_tasks: angles.
        root: where the data lie, see `onebasin.datasets.mnist`.
        validation: examine on a tenth of the training images, which are then not learnt from, instead of the test images.
        device: where images are kept and rotated.
    """
    train, test = _read_images(datasets.mnist, root, validation, device)
    return rotated(train, test, num_tasks, name="Rotated MNIST")


def split_cifar100(
    num_tasks: int = 20,
    root: Root = None,
    validation: bool = False,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> Stream:
    """CIFAR-100 split into tasks of equally many classes, each with a head of its own; arguments as for `rotated_mnist`.

    Args:
        num_tasks: 20 makes five classes a task.
        root: where the data lie, see `onebasin.datasets.cifar100`.
        validation: examine on a tenth of the training images, which are then not learnt from, instead of the test images.
        device: where images are kept.
        seed: shuffles the classes; None keeps their order.
    """
    train, test = _read_images(datasets.cifar100, root, validation, device)
    return split(train, test, num_tasks, seed=seed, name="Split CIFAR-100")


def _read_images(
    reader: Callable[..., Images], root: Root, validation: bool, device: torch.device | str
) -> tuple[Images, Images]:
    images, labels = reader("train", root)
    train = images.to(device), labels.to(device)
    if validation:
        return hold_out(train)
    images, labels = reader("test", root)
    return train, (images.to(device), labels.to(device))
