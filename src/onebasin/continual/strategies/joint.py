"""Joint training: all tasks so far together, from the initial network. The upper bound."""

import copy
from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Samples
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.streams import Task
from onebasin.continual.training import Loss, Training


class Joint(Strategy):
    """Minimise sum_{k <= i} C(theta; T_k) from the initial network, with all examples of every task.

    Training anew after each task is costly: `gather` adds a task without training, for all but the last.

    Args:
        model: Where to start, each time.
        loss: ``loss(output, target)``.
        training: See `Training`.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.Joint(model, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    def __init__(self, model: nn.Module, loss: Loss = functional.cross_entropy, **training: Unpack[Training]):
        super().__init__(model, loss, **training)
        self._start = copy.deepcopy(self.model.state_dict())
        self._seen: list[Samples] = []

    def gather(self, task: Task) -> None:
        """Store a task for the next `fit`."""
        self._seen.append(self._add_task(task))

    def count_steps(self, num_samples: int) -> int:
        """The number of steps on all tasks so far."""
        return super().count_steps(num_samples + sum(len(samples) for samples in self._seen))

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """Start again from the initial network, with batches of all tasks so far."""
        self._seen.append(samples)
        self.model.load_state_dict(self._start)
        return super().make_step(Samples.join(self._seen), num_steps)

    def cost(self) -> Tensor:
        """The loss on a batch of all tasks so far."""
        return self.task_loss()

    def state_dict(self) -> dict[str, Any]:
        """The state, with all tasks."""
        return {**super().state_dict(), "start": self._start, "seen": [samples.parts for samples in self._seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, with all its tasks."""
        super().load_state_dict(state)
        self._start = {key: value.to(self.device) for key, value in state["start"].items()}
        self._seen = [Samples(*(part.to(self.device) for part in parts)) for parts in state["seen"]]
