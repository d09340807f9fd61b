"""Joint training: all tasks so far at once, from the start. The upper bound."""

import copy
from collections.abc import Callable
from typing import Any, Unpack

from torch import nn
from torch.nn import functional

from onebasin.continual.samples import Samples
from onebasin.continual.strategies.base import Loss, Strategy, Training
from onebasin.continual.streams import Task


class Joint(Strategy):
    """Minimise sum_{k <= i} C(theta; T_k) from the initial network, with every task kept whole.

    Training anew after each task is costly: `gather` takes a task in without training, for all but the last.

    Args:
        model: where to start, each time.
        loss: ``loss(output, target)``.
        training: see `Training`.
    """

    def __init__(self, model: nn.Module, loss: Loss = functional.cross_entropy, **training: Unpack[Training]):
        super().__init__(model, loss, **training)
        self._start = copy.deepcopy(self.model.state_dict())
        self._seen: list[Samples] = []

    def gather(self, task: Task) -> None:
        """Keep a task for the next `fit`."""
        self._seen.append(self._admit(task))

    def count_steps(self, num_samples: int) -> int:
        """Over everything."""
        return super().count_steps(num_samples + sum(len(samples) for samples in self._seen))

    def begin(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """Start again, on everything."""
        self._seen.append(samples)
        self.model.load_state_dict(self._start)
        return super().begin(Samples.join(self._seen), num_steps)

    def state_dict(self) -> dict[str, Any]:
        """With all tasks."""
        seen = [[s.inputs, s.targets, s.heads] for s in self._seen]
        return {**super().state_dict(), "start": self._start, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        super().load_state_dict(state)
        self._start = {key: value.to(self.device) for key, value in state["start"].items()}
        self._seen = [Samples(*(part.to(self.device) for part in parts)) for parts in state["seen"]]
