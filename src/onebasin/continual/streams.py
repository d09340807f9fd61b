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
    """Labelled data that a strategy learns, or is tested on.

    Attributes:
        inputs: (N, ...), on any device; uint8 images are read as numbers from 0 to 1.
        targets: (N,), labels.
        classes: The labels of this task, whose outputs become a head of its own (task-incremental learning). None: all
            labels of the model (domain- and class-incremental learning).
        name: For tables.

    >>> import torch
    >>> from onebasin import continual
    >>> task = continual.Task(torch.randn(20, 4), torch.randint(2, (20,)), classes=(0, 1), name="first two classes")
    >>> len(task.targets)
    20
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
        train: The tasks to learn, in this order.
        test: For each task, its test data.
        name: For tables.

    >>> import torch
    >>> from onebasin import continual
    >>> tasks = [continual.Task(torch.randn(20, 4), torch.randint(2, (20,))) for _ in range(6)]
    >>> stream = continual.Stream(train=tasks[:3], test=tasks[3:], name="noise")
    >>> len(stream.train)
    3
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


class _LazyTasks(Sequence[Task]):
    """Tasks that are made at each access, so that twenty rotations of a data set need not be in memory together."""

    def __init__(self, makers: Sequence[Callable[[], Task]]):
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> _LazyTasks: ...

    def __getitem__(self, index: int | slice) -> Task | _LazyTasks:
        return _LazyTasks(self._makers[index]) if isinstance(index, slice) else self._makers[index]()

    def __iter__(self) -> Iterator[Task]:
        return (make() for make in self._makers)


Images = tuple[Tensor, Tensor]
Root = str | os.PathLike[str] | None


def hold_out(images: Images, share: float = 0.1, seed: int = 0) -> tuple[Images, Images]:
    """Split images and labels at random into those to learn, and those on which to choose settings.

    >>> from onebasin.continual import hold_out
    >>> from onebasin.datasets import digits
    >>> (images, labels), (held_out, held_out_labels) = hold_out(digits("train"), share=0.25)
    >>> len(images), len(held_out)
    (1082, 360)
    """
    inputs, targets = images
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).to(inputs.device)
    num_held = max(1, round(share * len(inputs)))
    held, kept = order[:num_held], order[num_held:]
    return (inputs[kept], targets[kept]), (inputs[held], targets[held])


def rotated(train: Images, test: Images, num_tasks: int = 20, degrees: float = 180.0, name: str = "rotated") -> Stream:
    """The same images in every task, turned clockwise by angles from 0 to `degrees` (domain-incremental).

    Args:
        train: Images (N, C, H, W) and labels. Rotations are computed on their device, at each access to a task.
        test: Likewise; rotated once.
        num_tasks: The number of angles, evenly spaced, both ends included.
        degrees: The last angle.
        name: For tables.

    >>> from onebasin import continual
    >>> from onebasin.datasets import digits
    >>> stream = continual.rotated(digits("train"), digits("test"), num_tasks=3, degrees=90)
    >>> [task.inputs.shape[0] for task in stream.test]
    [355, 355, 355]
    """
    if num_tasks < 2:
        raise ValueError(f"a stream of rotations needs at least two tasks, got {num_tasks}")
    angles = [degrees * i / (num_tasks - 1) for i in range(num_tasks)]

    def make(images: Images, angle: float) -> Task:
        return Task(rotate(images[0], angle), images[1], name=f"{angle:.1f} degrees")

    return Stream(
        _LazyTasks([lambda angle=angle: make(train, angle) for angle in angles]), [make(test, a) for a in angles], name
    )


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images (N, C, H, W) clockwise about their centre, bilinearly, black outside; in their own dtype and device.

    >>> import torch
    >>> from onebasin.continual import rotate
    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).round().tolist()
    [[[[3.0, 1.0], [4.0, 2.0]]]]
    """
    if degrees == 0:
        return images
    angle = math.radians(degrees)
    # The position that each output pixel is read from: the inverse rotation, with the vertical axis pointing down.
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
        train: Inputs and labels.
        test: Likewise.
        num_tasks: Must divide the number of classes.
        heads: Whether the classes of a task are known, in training and in tests (task-incremental), or not
            (class-incremental).
        seed: Shuffles the classes; None keeps their order.
        name: For tables.

    >>> from onebasin import continual
    >>> from onebasin.datasets import digits
    >>> [task.classes for task in continual.split(digits("train"), digits("test"), num_tasks=5).train]
    [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
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
    """The embedded 8 x 8 digits, rotated: for tests and examples.

    >>> from onebasin import continual
    >>> len(continual.rotated_digits(num_tasks=3).train)
    3
    """
    return rotated(datasets.digits("train"), datasets.digits("test"), num_tasks, degrees, "rotated digits")


def split_digits(num_tasks: int = 5, heads: bool = True) -> Stream:
    """The embedded 8 x 8 digits, two classes per task.

    >>> from onebasin import continual
    >>> continual.split_digits().train[1].classes
    (2, 3)
    """
    return split(datasets.digits("train"), datasets.digits("test"), num_tasks, heads, name="split digits")


def rotated_mnist(
    num_tasks: int = 20, root: Root = None, validation: bool = False, device: torch.device | str = "cpu"
) -> Stream:
    """MNIST turned by angles from 0 to 180 degrees: 60,000 images per task, always the same ten classes.

    Args:
        num_tasks: The number of angles.
        root: The folder of the data, see `onebasin.datasets.mnist`.
        validation: Test on a tenth of the training images, which are then not learned, instead of the test images.
        device: Where images are stored and rotated.

    >>> from onebasin import continual
    >>> stream = continual.rotated_mnist(num_tasks=5, root="data")  # doctest: +SKIP
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
    """CIFAR-100 split into tasks of equally many classes, each with a head of its own.

    The arguments are those of `rotated_mnist`, and a `seed`, which shuffles the classes; None keeps their order.

    >>> from onebasin import continual
    >>> stream = continual.split_cifar100(num_tasks=5, root="data")  # doctest: +SKIP
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
