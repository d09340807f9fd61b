"""Labelled examples, and batches of them that a training step draws on the device without the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Labelled examples.

    Attributes:
        inputs: (N, ...); uint8 images are read as numbers from 0 to 1.
        targets: (N,).
        heads: (N,), the number of the task that each example belongs to, which determines the outputs it may use.
    """

    inputs: Tensor
    targets: Tensor
    heads: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def parts(self) -> list[Tensor]:
        """The three tensors, for a state dict."""
        return [self.inputs, self.targets, self.heads]

    def at(self, index: Tensor | slice) -> Samples:
        """The examples at an index."""
        return Samples(self.inputs[index], self.targets[index], self.heads[index])

    @staticmethod
    def join(parts: Sequence[Samples]) -> Samples:
        """Concatenate several sets of examples."""
        return Samples(*map(torch.cat, zip(*(each.parts for each in parts), strict=True)))


def as_input(inputs: Tensor) -> Tensor:
    """The input of a network: uint8 images as numbers from 0 to 1, everything else unchanged."""
    return inputs / 255 if inputs.dtype == torch.uint8 else inputs


class Feed:
    """Shuffled batches, whose order and current position are stored on the device.

    The order of all batches is drawn beforehand, so that drawing a batch needs nothing from the host and a step can be
    captured in a CUDA graph. Passes over the samples follow each other without a gap: a batch may contain the end of one and
    the start of the next.

    Args:
        samples: To draw from.
        batch_size: Examples per batch.
        num_steps: How many batches can be drawn.
        generator: On the CPU, so that the order does not depend on the device.
        members: Networks that are trained together, see `Training`: example j of a batch is for network j % members. Each
            network has an order of its own, and `batch_size` examples in every batch.
        partitioned: Whether the samples too are divided among the networks: each draws only from the samples j that have
            its number as j % members.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        num_steps: int,
        generator: torch.Generator,
        members: int = 1,
        partitioned: bool = False,
    ):
        self.samples = samples
        device = samples.inputs.device
        num_samples = len(samples) // members if partitioned else len(samples)
        num_passes = -(-num_steps * batch_size // num_samples)
        keys = torch.rand(num_passes, members, num_samples, generator=generator).to(device)
        order = keys.argsort(dim=-1, stable=True)  # stable: equal keys must not depend on the device either
        if partitioned:
            order = order * members + torch.arange(members, device=device).unsqueeze(1)
        rows = order.transpose(1, 2).flatten()
        self._order = rows[: num_steps * batch_size * members].view(num_steps, batch_size * members)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def draw(self) -> Samples:
        """The next batch."""
        index = self._order.index_select(0, self._position).squeeze(0)
        self._position.add_(1)
        return self.samples.at(index)
