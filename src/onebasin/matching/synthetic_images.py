"""Images that are drawn, for those who have none.

Overlapping leaves of random sizes, colours and shades, with some noise, have statistics of photographs (the "dead leaves"
model; Baradad et al. 2021 train networks on such images). Classifiers see enough in them to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import copy_model
from onebasin.matching.methods.base import check_count
from onebasin.matching.synthetic_data import count_classes
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded


def synthetic_images(
    models: Sequence[nn.Module],
    shape: Sequence[int],
    num_batches: int = 8,
    batch_size: int = 500,
    num_leaves: int = 40,
    seed: int = 0,
    progress: bool | Progress = False,
) -> list[tuple[Tensor, Tensor]]:
    """Draw images of random overlapping shapes, and let classifiers say how likely each class is.

    Unlike `onebasin.synthetic_data` this needs no batch norms: the images do not depend on the models. Together they have
    zero mean and unit deviation, as the inputs of most classifiers have.

    Args:
        models: classifiers of the same images and classes; left untouched.
        shape: of one image, (channels, height, width).
        num_batches: how many batches to draw.
        batch_size: images in each.
        num_leaves: how many shapes one image has.
        seed: for everything random.
        progress: show a progress line; or a function to call with what is done, how far, and how much there is.

    Returns:
        Pairs (images, probabilities), as `onebasin.align` and `onebasin.merge` take them for ``data=``. The probabilities
        are the mean of those of the models; `torch.nn.functional.cross_entropy` takes them as targets.

    Raises:
        ValueError: if a model does not take images of this shape, or does not return a score per class.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    >>> ((images, chances),) = ob.synthetic_images([model], (3, 8, 8), 1, batch_size=4)
    >>> images.shape, chances.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 5]))
    """
    for name, count in {"num_batches": num_batches, "batch_size": batch_size, "num_leaves": num_leaves}.items():
        check_count(name, count, at_least=1)
    if not isinstance(shape, Sequence) or [type(size) for size in shape] != [int] * 3 or min(shape) < 1:
        raise ValueError(f"the shape of an image is (channels, height, width), got {shape!r}")
    if not models:
        raise ValueError("synthetic images are labelled by at least one model")
    copies = [copy_model(model).requires_grad_(False).eval() for model in models]
    first = next(copies[0].parameters())
    count_classes(copies, first.new_zeros(2, *shape))
    batches = []
    with show_progress(progress) as show, seeded(seed, first.device), torch.no_grad():
        for number in range(num_batches):
            show("synthetic images", number, num_batches)
            images = _draw(batch_size, shape, num_leaves, first.device).to(first.dtype)
            batches.append((images, torch.stack([model(images).softmax(1) for model in copies]).mean(0)))
    return batches


def _draw(count: int, shape: Sequence[int], num_leaves: int, device: torch.device) -> Tensor:
    """Leaves upon leaves, with noise, half of it blurred."""
    channels, height, width = shape
    y = torch.linspace(-0.5, 0.5, height, device=device)[:, None]
    x = torch.linspace(-0.5, 0.5, width, device=device)
    ground = torch.randn(count, 1, 1, 1, device=device) + 0.35 * torch.randn(count, channels, 1, 1, device=device)
    scale = 2 ** torch.empty(count, 1, 1, 1, device=device).uniform_(-1, 2)
    images = ground.expand(count, *shape)
    for _ in range(num_leaves):
        right, down = (side - (torch.rand(count, 1, 1, 1, device=device) - 0.5) for side in (x, y))
        hue = 0.3 * ground + 0.35 * torch.randn_like(ground)
        light, slope, lean = torch.randn(3, count, 1, 1, 1, device=device)
        shade = hue + 0.9 * light + 0.8 * (slope * right + lean * down)
        images = torch.where(_is_covered(right / scale, down / scale), shade, images)
    images = images + 0.25 * _make_noise(count, shape, device)
    images = (images + nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)) / 2
    return (images - images.mean()) / images.std()


def _is_covered(right: Tensor, down: Tensor) -> Tensor:
    """The pixels of one leaf per image, given as places relative to its centre: an ellipse or a rectangle, turned."""
    count = len(right)
    draws = torch.rand(4, count, 1, 1, 1, device=right.device)
    size = (0.06 * (draws[0] + 0.02).rsqrt()).clamp(max=0.6)
    aspect, angle, is_round = 0.3 + 1.4 * draws[1], math.pi * draws[2], draws[3] < 0.6
    along = (right * angle.cos() + down * angle.sin()) / aspect
    across = (down * angle.cos() - right * angle.sin()) * aspect
    square = torch.maximum(along.abs(), across.abs())
    return torch.where(is_round, (along.square() + across.square()).sqrt(), square) < size


def _make_noise(count: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Noise of unit deviation whose strength falls with the frequency, as in photographs."""
    _, height, width = shape
    vertical, horizontal = torch.fft.fftfreq(height, device=device)[:, None], torch.fft.rfftfreq(width, device=device)
    frequency = (vertical.square() + horizontal.square()).sqrt()
    frequency[0, 0] = 1
    waves = torch.fft.rfft2(torch.randn(count, *shape, device=device)) / frequency**1.2
    noise = torch.fft.irfft2(waves, s=(height, width))
    return noise / noise.std((1, 2, 3), keepdim=True)
