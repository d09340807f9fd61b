"""What all strategies have in common: tasks in, a network out; batches, memory, heads, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.continual.memory import Memory
from onebasin.continual.samples import Feed, Samples, as_input
from onebasin.continual.streams import Task
from onebasin.descent.cuda_graphs import run_steps
from onebasin.landscape.repair import batch_norms, reset_statistics

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Weighting = Literal["pooled", "equal"]
_NORM_BATCHES, _NORM_BATCH_SIZE = 20, 100


class Training(TypedDict, total=False):
    """How a task is trained on; options of every strategy.

    Attributes:
        optimizer: from a list of parameters to an optimiser, made anew for each task; SGD with a step of 0.1 if not given.
        batch_size: examples of the task a step (100).
        epochs: passes over a task (5).
        first_optimizer: for the first task, before there is anything to forget; `optimizer` if not given.
        first_epochs: for the first task; `epochs` if not given.
        memory_per_class: examples kept of each class of each task (5), by strategies that have a memory.
        replay_size: examples of the memory a step; the smaller of `batch_size` and the memory if not given.
        reset_norms: estimate batch-norm statistics anew after each task, on batches in which all tasks so far have the same
            share; needs a memory. Otherwise they are those of the training batches.
        seed: of batches and memory.
        members: how many networks the model is, stacked along the first axis of every parameter, to be trained side by side
            in the time of little more than one. Example j of a batch is for member j % members, and the cost is the sum of
            theirs. Each has its own batches and its own memory.
        capture: run steps as CUDA graphs. The optimiser must be one that can be captured: SGD and the Adam family are.
    """

    optimizer: MakeOptimizer
    batch_size: int
    epochs: int
    first_optimizer: MakeOptimizer | None
    first_epochs: int | None
    memory_per_class: int
    replay_size: int | None
    reset_norms: bool
    seed: int
    members: int
    capture: bool


class Losses(NamedTuple):
    """The parts of a replaying step's cost.

    Attributes:
        new: the loss on a batch of the task.
        old: that on a batch of the memory; None while it is empty.
        kept: the mean squared distance, on another batch of the memory, to what the network answered when each example's
            task was done (Buzzega et al. 2020); None if answers are not kept.
        share: of the task in both batches together.
    """

    new: Tensor
    old: Tensor | None
    kept: Tensor | None
    share: float

    def weigh(self, weighting: Weighting) -> Tensor:
        """Task and memory: "pooled" is the mean over both batches, "equal" the average of the two means."""
        if self.old is None:
            return self.new
        return torch.lerp(self.old, self.new, self.share if weighting == "pooled" else 0.5)


def sgd(lr: float = 0.1, **options: Any) -> MakeOptimizer:
    """Plain stochastic gradient descent, as an argument of strategies."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **{**_fuse(parameters), **options})


def adam(lr: float = 1e-3, **options: Any) -> MakeOptimizer:
    """Adam, as an argument of strategies."""
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, **{**_fuse(parameters), **options})


def _fuse(parameters: list[nn.Parameter]) -> dict[str, bool]:
    """On a GPU one kernel for all parameters: a small network takes no longer than its kernels are many."""
    return {"fused": True} if all(parameter.is_cuda for parameter in parameters) else {}


class Strategy:
    """Learns one task after the other: ``fit(task)``, then look at ``model``.

    By itself it trains on each task alone, from the network that the last one left (see `Finetune`). Other strategies change
    the cost of a step, or the step.

    Args:
        model: where to start. A copy is trained, on the device of the model.
        loss: ``loss(output, target)``, a mean over the batch.
        training: see `Training`.
    """

    replays = False  # has a memory
    recalls = False  # keeps the network's answers beside it

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
        counts["members"] = members
        for name, value in counts.items():
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
        self.memory = Memory(memory_per_class if self.replays else 0, members, seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.heads: list[tuple[int, ...] | None] = []
        self._forbidden: Tensor | None = None
        self._feed: Feed | None = None
        self._replay: Feed | None = None
        self._answers: Tensor | None = None  # in the order of the memory
        self._recall: Feed | None = None

    @property
    def num_tasks(self) -> int:
        """Tasks learnt so far."""
        return len(self.heads)

    # ------------------------------------------------------------------------------------------------ learning a task

    def fit(self, task: Task) -> None:
        """Learn a task."""
        for _ in self.learn(task):
            pass

    def learn(self, task: Task) -> Iterator[int]:
        """`fit` in portions: yields the number of steps done, so that several strategies can take turns on a device."""
        samples = self._admit(task)
        num_steps, done = self.count_steps(len(samples)), 0
        for step, count in self.phases(samples, num_steps):
            self.model.train()
            for number in run_steps(step, count, self.device, self.capture):
                yield done + number
            done += count
            self.model.eval()
        self.finish(samples)
        if self.reset_norms and len(self.memory):
            self._estimate_norms(samples)
        self.keep(samples)
        self._feed = self._replay = self._recall = None

    def count_steps(self, num_samples: int) -> int:
        """Steps on a task of so many examples."""
        epochs = self.first_epochs if self.num_tasks == 1 else self.epochs
        return max(1, epochs * num_samples // self.batch_size)

    def phases(self, samples: Samples, num_steps: int) -> Iterator[tuple[Callable[[], None], int]]:
        """What is done on a task, one after the other: a step, and how many of it."""
        yield self.begin(samples, num_steps), num_steps

    def begin(self, samples: Samples, num_steps: int) -> Callable[[], None]:
        """Make ready for a task, and return what is to be done at each step."""
        self.open_feeds(samples, num_steps)
        make = self.first_optimizer if self.num_tasks == 1 else self.optimizer
        optimizer = self.make_optimizer(make, list(self.model.parameters()))

        def step() -> None:
            optimizer.zero_grad()
            self.cost().backward()
            optimizer.step()

        return step

    def cost(self) -> Tensor:
        """What one step minimises: the loss on a batch of the task."""
        batch = self.feed.draw()
        return self.loss(self.answer(batch), batch.targets)

    def finish(self, samples: Samples) -> None:
        """Called when the steps of a task are done."""

    def keep(self, samples: Samples) -> None:
        """Add the task to the memory, with what the network answers now if that is wanted."""
        kept = self.memory.add(samples)
        if self.recalls and kept is not None:
            with torch.no_grad():
                answers = self._output(kept.inputs)
            self._answers = answers if self._answers is None else torch.cat([self._answers, answers])

    # ---------------------------------------------------------------------------------------- what strategies build on

    @property
    def feed(self) -> Feed:
        """Batches of the task."""
        assert self._feed is not None
        return self._feed

    @property
    def replay(self) -> Feed | None:
        """Batches of the memory, while it has something."""
        return self._replay

    def open_feeds(self, samples: Samples, num_steps: int) -> None:
        """Draw the order of this task's batches, and of the memory's."""
        self._feed = Feed(samples, self.batch_size, num_steps, self.generator, self.members)
        if len(self.memory):
            memory = self.memory.samples
            self._replay = self._open_memory(memory, num_steps)
            if self._answers is not None:
                self._recall = self._open_memory(Samples(memory.inputs, self._answers, memory.heads), num_steps)

    def _open_memory(self, samples: Samples, num_steps: int) -> Feed:
        size = self.replay_size or min(self.batch_size, len(samples) // self.members)
        return Feed(samples, size, num_steps, self.generator, self.members, own=True)

    def make_optimizer(self, make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser, made fit for capture on a CUDA device."""
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            if self.capture and "capturable" in group:
                group["capturable"] = True
        return optimizer

    def answer(self, batch: Samples, params: dict[str, Tensor] | None = None) -> Tensor:
        """The network's output on a batch, of the classes each example's head has; with `params` in place of its own."""
        return self.restrict(self._output(batch.inputs, params), batch.heads)

    def _output(self, inputs: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
        inputs = as_input(inputs)
        return self.model(inputs) if params is None else torch.func.functional_call(self.model, params, (inputs,))

    def restrict(self, output: Tensor, heads: Tensor) -> Tensor:
        """Put what a head may not answer out of reach. Not at -inf: zero times that is not zero, and some losses meet it."""
        if self._forbidden is None:
            return output
        return output.masked_fill(self._forbidden[heads], torch.finfo(output.dtype).min / 4)

    def losses(self, params: dict[str, Tensor] | None = None) -> Losses:
        """What a step may weigh, on the next batches of task and memory; in one pass, so that batch norms see them together.

        Args:
            params: in place of the network's own.
        """
        feeds = [feed for feed in (self._feed, self._replay, self._recall) if feed is not None]
        batches = [feed.draw() for feed in feeds]
        outputs = self._output(torch.cat([batch.inputs for batch in batches]), params).split([len(b) for b in batches])
        new, *old = (
            self.loss(self.restrict(output, batch.heads), batch.targets)
            for output, batch in zip(outputs[:2], batches[:2], strict=True)
        )
        kept = self.members * functional.mse_loss(outputs[2], batches[2].targets) if len(batches) > 2 else None
        return Losses(new, old[0] if old else None, kept, len(batches[0]) / sum(len(batch) for batch in batches[:2]))

    def _admit(self, task: Task) -> Samples:
        """Check a task, give it a head, and bring it to the device."""
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
        self._forbid(output.shape[-1])
        head = torch.full((len(task),), self.num_tasks - 1, dtype=torch.int64, device=self.device)
        return Samples(task.inputs.to(self.device), task.targets.to(self.device), head)

    def _forbid(self, num_outputs: int) -> None:
        if any(classes is not None for classes in self.heads):
            table = torch.zeros(self.num_tasks, num_outputs, dtype=torch.bool)
            for row, classes in zip(table, self.heads, strict=True):
                if classes is not None:
                    row[:] = True
                    row[list(classes)] = False
            self._forbidden = table.to(self.device)

    def _estimate_norms(self, samples: Samples) -> None:
        if not batch_norms(self.model):
            return
        num_new = max(1, _NORM_BATCH_SIZE // self.num_tasks)
        num_old = _NORM_BATCH_SIZE - num_new
        feeds = [
            Feed(samples, num_new, _NORM_BATCHES, self.generator, self.members),
            Feed(self.memory.samples, num_old, _NORM_BATCHES, self.generator, self.members, own=True),
        ]
        reset_statistics(self.model, [as_input(torch.cat([f.draw().inputs for f in feeds])) for _ in range(_NORM_BATCHES)])

    # ------------------------------------------------------------------------------------------------- looking and saving

    def accuracies(self, tasks: Iterable[Task]) -> Tensor:
        """The share of right answers in each task, (tasks,) or (tasks, members); on the device, so nothing waits for it."""
        return torch.stack([accuracy(self.model, task.to(self.device), self.members) for task in tasks])

    def state_dict(self) -> dict[str, Any]:
        """Everything the next task depends on: tensors and plain values, for ``torch.save``; between two tasks only."""
        if self._feed is not None:
            raise ValueError("a task is being learnt, or was broken off: the state can be taken between two tasks only")
        return {
            "strategy": type(self).__name__,
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "memory": self.memory.state_dict(),
            "heads": [None if classes is None else list(classes) for classes in self.heads],
            "generator": self.generator.get_state(),
            "answers": self._answers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where a strategy made with the same arguments was."""
        if state.get("strategy") != type(self).__name__:
            raise ValueError(f"expected the state of a {type(self).__name__}, got that of a {state.get('strategy')!r}")
        recalls = self.recalls and state["memory"]["samples"] is not None
        if recalls != (state["answers"] is not None):
            wanted = "with" if recalls else "without"
            raise ValueError(f"expected a state {wanted} kept answers: make the strategy with the arguments it had")
        self._feed = self._replay = self._recall = None
        self.model.load_state_dict(state["model"])
        self.memory.load_state_dict(state["memory"], self.device)
        self.heads = [None if classes is None else tuple(classes) for classes in state["heads"]]
        self.generator.set_state(state["generator"].cpu())
        self._answers = None if state["answers"] is None else state["answers"].to(self.device)


def accuracy(model: nn.Module, task: Task, members: int = 1, batch_size: int = 5000) -> Tensor:
    """The share of right answers in eval mode, among the classes of the task if it has any; on the device of the task.

    Args:
        model: left as it is.
        task: what to answer.
        members: networks in the model, see `Training`; the result then is (members,).
        batch_size: examples at a time.
    """
    right = torch.zeros(members, device=task.inputs.device)
    allowed = None if task.classes is None else torch.tensor(task.classes, device=task.inputs.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        for inputs, targets in zip(task.inputs.split(batch_size), task.targets.split(batch_size), strict=True):
            output = model(as_input(inputs.repeat_interleave(members, dim=0) if members > 1 else inputs))
            chosen = output.argmax(1) if allowed is None else allowed[output[:, allowed].argmax(1)]
            right += (chosen.view(-1, members) == targets.unsqueeze(1)).sum(0)
    for module, mode in modes.items():
        module.training = mode
    return (right if members > 1 else right.squeeze(0)) / len(task)
