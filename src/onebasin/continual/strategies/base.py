"""The base class of all strategies: it trains a network on tasks, with batches, a memory, heads and checkpoints."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.memory import Memory
from onebasin.continual.metrics import accuracy
from onebasin.continual.samples import Feed, Samples, as_input
from onebasin.continual.streams import Task
from onebasin.continual.training import Loss, Losses, MakeOptimizer, sgd
from onebasin.descent.cuda_graphs import run_steps
from onebasin.landscape.batch_norm import batch_norms, reset_statistics
from onebasin.tensors.gradient_mode import computing_gradients

_NUM_MIXED_BATCHES, _MIXED_BATCH_SIZE = 20, 100


class Strategy(ABC):
    """Learns one task after the other: ``fit(task)``, then use ``model``.

    A strategy of your own must define `cost`, what a training step minimises. It may override the other hooks. For each
    task `learn` calls `count_steps`, `phases` (which calls `make_step`, whose steps call `cost`), `after_task`, `remember`.

    Args:
        model: Where to start. A copy is trained, on the device of the model.
        loss: ``loss(output, target)``, a mean over the batch.
        training: See `Training`.

    Attributes:
        uses_memory: Whether examples are stored in `memory`.
        stores_outputs: Whether the network's outputs are stored with them.
        feeds: Within a task, batches of it; then of the memory and of the stored outputs, while there are any.
        history: What a strategy reports of each task; empty for most.

    >>> from torch import nn
    >>> from onebasin import continual
    >>> stream = continual.split_digits()
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> class SmallWeights(continual.Finetune):
    ...     def cost(self):
    ...         return super().cost() + 1e-4 * sum(weight.square().sum() for weight in self.model.parameters())
    >>> strategy = SmallWeights(model, epochs=3, batch_size=20)
    >>> for task in stream.train[:2]:
    ...     strategy.fit(task)
    >>> bool(continual.accuracy(strategy.model, stream.test[1]) > 0.5)
    True
    """

    uses_memory: ClassVar[bool] = False
    stores_outputs: bool = False

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = functional.cross_entropy,
        *,
        optimizer: MakeOptimizer | None = None,
        batch_size: int = 100,
        epochs: int = 5,
        first_optimizer: MakeOptimizer | None = None,
        first_epochs: int | None = None,
        memory_per_class: int = 5,
        replay_size: int | None = None,
        reset_norms: bool = False,
        seed: int = 0,
        members: int = 1,
        capture: bool = False,
    ):
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("the model has no parameters to train")
        counts = {"batch_size": batch_size, "epochs": epochs, "first_epochs": first_epochs, "replay_size": replay_size}
        for name, value in {**counts, "members": members}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if capture and parameter.device.type != "cuda":
            raise ValueError(f"capture=True needs a model on a CUDA device, this one is on {parameter.device}")
        self.model = copy.deepcopy(model).eval()
        self.loss = loss if members == 1 else lambda output, target: members * loss(output, target)
        self.members, self.device = members, parameter.device
        self.optimizer = optimizer or sgd()
        self.first_optimizer, self.first_epochs = first_optimizer or self.optimizer, first_epochs or epochs
        self.batch_size, self.epochs, self.replay_size = batch_size, epochs, replay_size
        self.reset_norms, self.capture = reset_norms, capture
        self.memory = Memory(memory_per_class if self.uses_memory else 0, members, seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.heads: list[tuple[int, ...] | None] = []
        self.history: list[dict[str, float]] = []
        self._head_mask: Tensor | None = None  # (tasks, outputs), true for outputs that the task may not use
        self.feeds: list[Feed] = []
        self._stored_outputs: Tensor | None = None  # in the order of the memory

    @property
    def num_tasks(self) -> int:
        """Tasks learned so far."""
        return len(self.heads)

    def fit(self, task: Task) -> None:
        """Learn a task."""
        for _ in self.learn(task):
            pass

    @computing_gradients
    def learn(self, task: Task) -> Iterator[int]:
        """`fit` in portions: yields the number of steps done, so that several strategies can take turns on a device."""
        samples = self._add_task(task)
        num_steps, done = self.count_steps(len(samples)), 0
        for step, count in self.phases(samples, num_steps):
            self.model.train()
            for number in run_steps(step, count, self.device, self.capture):
                yield done + number
            done += count
            self.model.eval()
        self.after_task(samples)
        if self.reset_norms and len(self.memory) and batch_norms(self.model):
            reset_statistics(self.model, self.mixed_batches(samples))
        self.remember(samples)
        self.feeds = []

    def count_steps(self, num_samples: int) -> int:
        """Hook: the number of steps on a task of so many examples."""
        epochs = self.first_epochs if self.num_tasks == 1 else self.epochs
        return max(1, epochs * num_samples // self.batch_size)

    def phases(self, samples: Samples, num_steps: int) -> Iterator[tuple[Callable[[], None], int]]:
        """Hook: the parts of the training on a task, each a step and how often to run it."""
        yield self.make_step(samples, num_steps), num_steps

    def make_step(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """Hook: prepare for a task, and return its training step."""
        self.open_feeds(samples, num_steps)
        make = self.first_optimizer if self.num_tasks == 1 else self.optimizer
        optimizer = self.make_optimizer(make, list(self.model.parameters()))

        def step() -> None:
            optimizer.zero_grad()
            self.cost().backward()
            optimizer.step()

        return step

    @abstractmethod
    def cost(self) -> Tensor:
        """Hook: what a training step minimises, on the next batches of its feeds."""

    def after_task(self, samples: Samples) -> None:  # noqa: B027, not every strategy needs it
        """Hook: called when the steps of a task are done; does nothing by default."""

    def remember(self, samples: Samples) -> None:
        """Hook: add a task to the memory, with the network's current outputs if they are to be stored."""
        added = self.memory.add(samples)
        if self.stores_outputs and added is not None:
            with torch.no_grad():
                outputs = self._output(added.inputs)
            self._stored_outputs = outputs if self._stored_outputs is None else torch.cat([self._stored_outputs, outputs])

    def open_feeds(self, samples: Samples, num_steps: int) -> None:
        """Draw the order of all batches of a task, and of those of the memory."""
        self.feeds = [Feed(samples, self.batch_size, num_steps, self.generator, self.members)]
        if len(self.memory):
            memory = self.memory.samples
            size = self.replay_size or min(self.batch_size, len(memory) // self.members)
            outputs = [] if self._stored_outputs is None else [replace(memory, targets=self._stored_outputs)]
            for each in (memory, *outputs):
                self.feeds.append(Feed(each, size, num_steps, self.generator, self.members, partitioned=True))

    def make_optimizer(self, make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser, one that can be captured if steps are."""
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            if self.capture and "capturable" in group:
                group["capturable"] = True
        return optimizer

    def forward(self, batch: Samples, params: dict[str, Tensor] | None = None) -> Tensor:
        """The network's output on a batch, masked by the head of each example; with `params` instead of its own if given."""
        return self.mask_heads(self._output(batch.inputs, params), batch.heads)

    def _output(self, inputs: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        inputs = as_input(inputs)
        return self.model(inputs) if params is None else torch.func.functional_call(self.model, params, (inputs,))

    def mask_heads(self, output: Tensor, heads: Tensor) -> Tensor:
        """Make outputs that a head may not use very negative. Not -inf: a loss that multiplies it by zero would be NaN."""
        if self._head_mask is None:
            return output
        return output.masked_fill(self._head_mask[heads], torch.finfo(output.dtype).min / 4)

    def task_loss(self) -> Tensor:
        """The loss on the next batch of the task alone."""
        batch = self.feeds[0].draw()
        return self.loss(self.forward(batch), batch.targets)

    def losses(self, params: dict[str, Tensor] | None = None) -> Losses:
        """The losses on the next batches of task and memory, in one pass, so that batch norms see them together.

        Args:
            params: Parameters to use instead of the network's own.
        """
        batches = [feed.draw() for feed in self.feeds]
        outputs = self._output(torch.cat([batch.inputs for batch in batches]), params).split([len(b) for b in batches])
        task, *memory = (
            self.loss(self.mask_heads(output, batch.heads), batch.targets)
            for output, batch in zip(outputs[:2], batches[:2], strict=True)
        )
        distance = self.members * functional.mse_loss(outputs[2], batches[2].targets) if len(batches) > 2 else None
        task_share = len(batches[0]) / sum(len(batch) for batch in batches[:2])
        return Losses(task, memory[0] if memory else None, distance, task_share)

    def _add_task(self, task: Task) -> Samples:
        """Check a task, give it a head, and copy it to the device."""
        with torch.no_grad():
            output = self.model(as_input(task.inputs[:1].to(self.device).repeat_interleave(self.members, dim=0)))
        if task.classes is not None:
            if output.dim() != 2 or not all(0 <= c < output.shape[1] for c in task.classes):
                raise ValueError(f"the classes {task.classes} are not all outputs of the model, {tuple(output.shape[1:])}")
            if not bool(torch.isin(task.targets.cpu(), torch.tensor(task.classes)).all()):
                raise ValueError(f"the task has labels that are not among its classes {task.classes}")
        elif output.dim() == 2 and not task.targets.is_floating_point():
            low, high = (int(label) for label in task.targets.aminmax())
            if low < 0 or high >= output.shape[1]:
                raise ValueError(f"the task has labels from {low} to {high}, the model has {output.shape[1]} outputs")
        self.heads.append(task.classes)
        if any(classes is not None for classes in self.heads):
            mask = torch.zeros(self.num_tasks, output.shape[-1], dtype=torch.bool)
            for row, classes in zip(mask, self.heads, strict=True):
                if classes is not None:
                    row[:] = True
                    row[list(classes)] = False
            self._head_mask = mask.to(self.device)
        head = torch.full((len(task),), self.num_tasks - 1, dtype=torch.int64, device=self.device)
        return Samples(task.inputs.to(self.device), task.targets.to(self.device), head)

    def mixed_batches(self, samples: Samples) -> list[Tensor]:
        """Inputs of a task and of the memory, in batches in which all tasks so far have the same share."""
        num_new = max(1, _MIXED_BATCH_SIZE // self.num_tasks)
        num_old = _MIXED_BATCH_SIZE - num_new
        feeds = [
            Feed(samples, num_new, _NUM_MIXED_BATCHES, self.generator, self.members),
            Feed(self.memory.samples, num_old, _NUM_MIXED_BATCHES, self.generator, self.members, partitioned=True),
        ]
        return [as_input(torch.cat([feed.draw().inputs for feed in feeds])) for _ in range(_NUM_MIXED_BATCHES)]

    def accuracies(self, tasks: Iterable[Task]) -> Tensor:
        """The accuracy on each task, (tasks,) or (tasks, members); on the device, so that nothing waits for it."""
        return torch.stack([accuracy(self.model, task.to(self.device), self.members) for task in tasks])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next task depends on, as tensors and plain values for ``torch.save``; not within a task."""
        if self.feeds:
            raise ValueError("a task is being learned, or was broken off: the state can be taken between two tasks only")
        return {
            "strategy": type(self).__name__,
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "memory": self.memory.state_dict(),
            "heads": [None if classes is None else list(classes) for classes in self.heads],
            "generator": self.generator.get_state(),
            "answers": self._stored_outputs,  # the key of older checkpoints
            "history": [dict(entry) for entry in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a strategy that was made with the same arguments."""
        if state.get("strategy") != type(self).__name__:
            raise ValueError(f"expected the state of a {type(self).__name__}, got that of a {state.get('strategy')!r}")
        expected = self.stores_outputs and state["memory"]["samples"] is not None
        if expected != (state["answers"] is not None):
            wanted = "with" if expected else "without"
            raise ValueError(f"expected a state {wanted} stored outputs: make the strategy with the arguments it had")
        self.feeds = []
        self.model.load_state_dict(state["model"])
        self.memory.load_state_dict(state["memory"], self.device)
        self.heads = [None if classes is None else tuple(classes) for classes in state["heads"]]
        self.generator.set_state(state["generator"].cpu())
        self._stored_outputs = None if state["answers"] is None else state["answers"].to(self.device)
        self.history = [dict(entry) for entry in state.get("history", [])]
