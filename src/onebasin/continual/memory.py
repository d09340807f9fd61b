"""The episodic memory: a few examples of every class of every task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebasin.continual.samples import Samples


class Memory:
    """Stores the same number of random examples of each class of each task.

    Args:
        per_class: Examples per class and task.
        members: Networks that are trained together, see `Training`. Each has that many; sample j belongs to network
            j % members.
        seed: Of the choice, which depends on nothing else: strategies with the same seed store the same examples.
    """

    def __init__(self, per_class: int, members: int = 1, seed: int = 0):
        if per_class < 0:
            raise ValueError(f"memory_per_class must not be negative, got {per_class}")
        self.per_class, self.members = per_class, members
        self._generator = torch.Generator().manual_seed(seed)
        self._samples: Samples | None = None

    def __len__(self) -> int:
        return 0 if self._samples is None else len(self._samples)

    @property
    def samples(self) -> Samples:
        """All stored examples, oldest task first."""
        if self._samples is None:
            raise ValueError("the memory is empty: no task was added yet")
        return self._samples

    def add(self, task: Samples) -> Samples | None:
        """Store examples of a task, the same number of each class; all examples of a class that has fewer.

        Returns:
            The examples that were stored; None if there are none.
        """
        if not self.per_class:
            return None
        targets = task.targets.cpu()
        choices = [_choose(targets, self.per_class, self._generator) for _ in range(self.members)]
        added = task.at(torch.stack(choices, dim=1).flatten().to(task.inputs.device))
        self._samples = added if self._samples is None else Samples.join([self._samples, added])
        return added

    def state_dict(self) -> dict[str, Any]:
        """The stored examples, and the state of the random choice."""
        samples = None if self._samples is None else self._samples.parts
        return {"samples": samples, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        samples = state["samples"]
        self._samples = None if samples is None else Samples(*(part.to(device) for part in samples))
        self._generator.set_state(state["generator"].cpu())


def _choose(targets: Tensor, per_class: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(targets), generator=generator)
    shuffled = targets[order]
    return torch.cat([order[shuffled == label][:per_class] for label in shuffled.unique()])
