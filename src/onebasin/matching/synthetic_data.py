"""Inputs made from trained networks alone, for those who have no data.

A batch norm keeps the mean and the variance of what it saw in training. Inputs that give every norm of a network those
statistics, and that the network is sure about, stand in for its training data (DeepInversion, Yin et al. 2020): units are
compared, scales learned and statistics estimated on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.landscape.batch_norm import batch_norms
from onebasin.landscape.batches import copy_model
from onebasin.matching.methods.base import check_count, check_number
from onebasin.tensors.gradient_mode import computing_gradients
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded
from onebasin.torch_internals import BatchNorm


@computing_gradients
def synthetic_data(
    models: Sequence[nn.Module],
    shape: Sequence[int],
    num_batches: int = 8,
    batch_size: int = 500,
    steps: int = 400,
    lr: float = 0.1,
    smoothness: float = 1e-3,
    seed: int = 0,
    progress: bool | Progress = False,
) -> list[tuple[Tensor, Tensor]]:
    """Make labelled inputs that classifiers with batch norms take for their training data.

    Each batch starts as noise and is moved by Adam until every norm sees its own mean and variance, and every classifier
    gives the inputs their labels, which are drawn evenly. Images are shifted at random in every step, so that no pixel
    matters by itself. A batch has to hold enough inputs for the statistics of every norm. On a GPU the classifiers compute
    in bfloat16; on a CPU under `torch.autocast`, as the caller has it.

    Args:
        models: classifiers of the same inputs and classes; left untouched.
        shape: of one input, such as ``(3, 32, 32)``.
        num_batches: how many batches to make, each by itself.
        batch_size: inputs in each.
        steps: of Adam per batch; its rate falls linearly to zero.
        lr: the first rate.
        smoothness: the weight of the squared differences between neighbouring pixels.
        seed: for everything random.
        progress: show a progress line; or a function to call with what is done, how far, and how much there is.

    Returns:
        Pairs (inputs, labels), as `onebasin.align` and `onebasin.merge` take them for ``data=``.

    Raises:
        ValueError: if a model has no batch norm with statistics, does not take inputs of this shape, or does not return a
            score per class.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    >>> ((images, labels),) = ob.synthetic_data([model], (1, 8, 8), num_batches=1, batch_size=20, steps=2)
    >>> images.shape, labels.bincount().tolist()
    (torch.Size([20, 1, 8, 8]), [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    for name, count in {"num_batches": num_batches, "batch_size": batch_size, "steps": steps}.items():
        check_count(name, count, at_least=1)
    check_number("lr", lr, above=0)
    check_number("smoothness", smoothness, at_least=0)
    if not models:
        raise ValueError("synthetic data is made from at least one model")
    copies = [copy_model(model).requires_grad_(False) for model in models]
    first = next(copies[0].parameters())
    num_classes = count_classes(copies, first.new_zeros(2, *shape))
    seen = _Statistics(copies)
    batches = []
    with show_progress(progress) as show, seeded(seed, first.device):
        for number in range(num_batches):
            show("synthetic batches", number, num_batches)
            labels = torch.randperm(batch_size, device=first.device) % num_classes
            inputs = torch.randn(batch_size, *shape, device=first.device, dtype=first.dtype, requires_grad=True)
            _fit(inputs, labels, copies, seen, steps, lr, smoothness)
            batches.append((inputs.detach(), labels))
    return batches


def count_classes(models: Sequence[nn.Module], example: Tensor) -> int:
    """The number of scores that each of some classifiers gives to each of two inputs.

    Raises:
        ValueError: if a model does not take such inputs, or is no classifier; if the numbers differ.
    """
    counts = []
    for model in models:
        try:
            with torch.no_grad():
                output = model(example)
        except RuntimeError as error:
            raise ValueError(f"a model cannot be called with inputs of shape {tuple(example.shape[1:])}: {error}") from error
        if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 2:
            raise ValueError("synthetic data is for classifiers: the output for a batch must be one row of scores per input")
        counts.append(output.shape[1])
    if len(set(counts)) > 1:
        raise ValueError(f"the models have different numbers of classes: {', '.join(map(str, counts))}")
    return counts[0]


class _Statistics:
    """How far what the norms of some models see is from what they saw in training, collected as the models are called."""

    def __init__(self, models: Sequence[nn.Module]):
        self.terms: list[Tensor] = []
        for number, model in enumerate(models, start=1):
            if not (norms := batch_norms(model)):
                raise ValueError(f"model {number} has no batch norm with statistics of its training data")
            for norm in norms.values():
                norm.register_forward_pre_hook(self._compare)

    def _compare(self, norm: BatchNorm, args: tuple[Tensor, ...]) -> None:
        value, mean, variance = args[0], norm.running_mean, norm.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(variance, Tensor)
        others = [axis for axis in range(value.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(value.dim())]
        # Moments about the mean of the training data, which is near: no digits are lost, and one pass is enough.
        shifted = value.to(mean.dtype) - mean.view(shape)
        first = shifted.mean(others)
        expected = variance + norm.eps
        found = (shifted.square().mean(others) - first.square()).clamp_min(0) + norm.eps
        self.terms.append((first.square() / expected).mean() + (found / expected).log().square().mean())


def _fit(
    inputs: Tensor, labels: Tensor, models: list[nn.Module], seen: _Statistics, steps: int, lr: float, smoothness: float
) -> None:
    on_cuda = inputs.is_cuda
    rate = torch.tensor(lr, device=inputs.device)
    optimizer = torch.optim.Adam([inputs], lr=rate, betas=(0.5, 0.9), capturable=on_cuda, foreach=on_cuda)

    def step(_: None) -> Tensor:
        seen.terms.clear()
        shifted = _shift(inputs)
        with torch.autocast("cuda", torch.bfloat16) if on_cuda else contextlib.nullcontext():
            fit = torch.stack([nn.functional.cross_entropy(model(shifted), labels) for model in models]).mean()
        cost = fit + torch.stack(seen.terms).sum() / len(models) + smoothness * _roughness(inputs)
        optimizer.zero_grad(set_to_none=True)
        cost.backward()
        optimizer.step()
        return cost.detach()

    take_step = CapturedStep(step, on_cuda, inputs.device)
    for number in range(steps):
        rate.fill_(lr * (1 - number / steps))
        take_step()


def _shift(inputs: Tensor) -> Tensor:
    """All inputs moved by up to a tenth of each side of the image, around its border; anything else as it is."""
    for axis in range(2, inputs.dim()):
        size = inputs.shape[axis]
        by = torch.randint(-(size // 10), size // 10 + 1, (1,), device=inputs.device)
        inputs = inputs.index_select(axis, (torch.arange(size, device=inputs.device) + by) % size)
    return inputs


def _roughness(inputs: Tensor) -> Tensor:
    total = inputs.new_zeros(())
    for axis in range(2, inputs.dim()):
        total = total + inputs.diff(dim=axis).square().mean()
    return total
