"""Examples with their answers, and batches of them that a step finds by itself on the device."""

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
        heads: (N,), the number of the task each example belongs to, which says the classes that may be answered.
    """

    inputs: Tensor
    targets: Tensor
    heads: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def at(self, index: Tensor | slice) -> Samples:
        """Some of them."""
        return Samples(self.inputs[index], self.targets[index], self.heads[index])

    @staticmethod
    def join(parts: Sequence[Samples]) -> Samples:
        """One after the other."""
        inputs, targets, heads = zip(*((p.inputs, p.targets, p.heads) for p in parts), strict=True)
        return Samples(torch.cat(inputs), torch.cat(targets), torch.cat(heads))


def as_input(inputs: Tensor) -> Tensor:
    """What a network is given: uint8 images as numbers from 0 to 1, everything else as it is."""
    return inputs / 255 if inputs.dtype == torch.uint8 else inputs


class Feed:
    """Shuffled batches, drawn by a step from its own position on the device.

    The whole order is drawn beforehand, so that drawing a batch needs nothing from the host: a step can be captured in a
    CUDA graph. Passes over the samples follow each other without a gap; a batch may hold the end of one and the start of
    the next.

    Args:
        samples: to draw from.
        batch_size: examples a batch.
        num_steps: batches that can be drawn.
        generator: on the CPU, so that the order does not depend on the device.
        members: networks trained side by side, see `Training`: example j of a batch is for member j % members, and each
            member has an order of its own. A batch then has `batch_size` examples for each.
        own: whether the samples too belong to members in turn, and each draws from its own alone.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        num_steps: int,
        generator: torch.Generator,
        members: int = 1,
        own: bool = False,
    ):
        self.samples = samples
        device = samples.inputs.device
        num_samples = len(samples) // members if own else len(samples)
        num_passes = -(-num_steps * batch_size // num_samples)
        keys = torch.rand(num_passes, members, num_samples, generator=generator).to(device)
        order = keys.argsort(dim=-1, stable=True)  # stable: equal keys must not depend on the device either
        if own:
            order = order * members + torch.arange(members, device=device).unsqueeze(1)
        rows = order.transpose(1, 2).flatten()
        self._order = rows[: num_steps * batch_size * members].view(num_steps, batch_size * members)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)

    def draw(self) -> Samples:
        """The next batch."""
        index = self._order.index_select(0, self._position).squeeze(0)
        self._position.add_(1)
        return self.samples.at(index)
