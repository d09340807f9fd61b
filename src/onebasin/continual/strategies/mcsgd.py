"""MC-SGD: stay linearly connected to the network before and to one that learned the new task alone."""

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.samples import Samples
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.training import Loss, MakeOptimizer, Training

Params = dict[str, Tensor]


class MCSGD(Strategy):
    """Mode connectivity SGD (Mirzadeh et al. 2020, arXiv 2010.04495).

    Two networks are trained. On each task a first one, w_t, goes on from w_{t-1} without a memory. The one that is kept,
    v_t, then minimises over v the loss on the memory along the line from v_{t-1}, and that on the task along the line from
    w_t:

        1/n sum_{s = 1/n, 2/n, ..., 1}  C(v_{t-1} + s (v - v_{t-1}); B_M) + C(w_t + s (v - w_t); B_t)

    It starts at v_{t-1} + start (w_t - v_{t-1}), and has as many steps as w_t had. After the first task v is w. The authors'
    code differs: it adds up the gradients at n points from 0 to 1 without the factors s and 1/n, so that its rates
    correspond to larger ones here; and its batches B_t are of the examples that go into the memory, here of the whole task.

    Args:
        model: Where to start.
        loss: ``loss(output, target)``.
        points: n. A step costs 2 n passes.
        start: Where on the line from v_{t-1} to w_t the descent starts.
        line_optimizer: For v; `optimizer`, which is for w, if not given.
        training: See `Training`. Here `reset_norms` is on, because batch norms have seen the whole lines.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> strategy = continual.MCSGD(model, points=3, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        points: int = 5,
        start: float = 0.05,
        line_optimizer: MakeOptimizer | None = None,
        **training: Unpack[Training],
    ):
        options: Training = {"reset_norms": True, **training}
        super().__init__(model, loss, **options)
        if points < 1:
            raise ValueError(f"points must be at least 1, got {points}")
        if not 0 <= start <= 1:
            raise ValueError(f"start must lie between 0 and 1, got {start}")
        if not self.memory.per_class:
            raise ValueError("the loss along a line is taken on the memory: memory_per_class must be at least 1")
        self.points, self.start = points, start
        self.line_optimizer = line_optimizer or self.optimizer
        self._kept: Params = {}  # v_{t-1}, within a task
        self._sequential: Params = {}  # w_t; empty before the second task, when it is the network itself

    def cost(self) -> Tensor:
        """The loss on a batch of the task, for w."""
        return self.task_loss()

    def phases(self, samples: Samples, num_steps: int) -> Iterator[tuple[Callable[[], None], int]]:
        """The steps of w; after the first task, also those of v."""
        if self.num_tasks == 1:
            yield from super().phases(samples, num_steps)
            return
        self._kept = self._copy()
        self._load(self._sequential or self._kept)
        yield from super().phases(samples, num_steps)
        self._sequential = self._copy()
        self._load({name: torch.lerp(value, self._sequential[name], self.start) for name, value in self._kept.items()})
        self.open_feeds(samples, num_steps)
        optimizer = self.make_optimizer(self.line_optimizer, list(self.model.parameters()))

        def step() -> None:
            optimizer.zero_grad()
            self.line_cost().backward()
            optimizer.step()

        yield step, num_steps

    def line_cost(self) -> Tensor:
        """The mean loss at the points of both lines, on the next batches of the task and of the memory."""
        params = dict(self.model.named_parameters())
        task, memory = (feed.draw() for feed in self.feeds)
        costs = []
        for number in range(1, self.points + 1):
            for end, batch in ((self._kept, memory), (self._sequential, task)):
                point = {name: torch.lerp(end[name], value, number / self.points) for name, value in params.items()}
                costs.append(self.loss(self.forward(batch, point), batch.targets))
        return torch.stack(costs).sum() / self.points

    def after_task(self, samples: Samples) -> None:
        """Release v_{t-1}."""
        self._kept = {}

    def _copy(self) -> Params:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _load(self, params: Params) -> None:
        self.model.load_state_dict(params, strict=False)  # parameters alone: buffers stay as they are

    def state_dict(self) -> dict[str, Any]:
        """The state, with w."""
        return {**super().state_dict(), "sequential": {name: value.clone() for name, value in self._sequential.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, with its w."""
        super().load_state_dict(state)
        self._sequential = {name: value.to(self.device).clone() for name, value in state["sequential"].items()}
