"""Use our strategies as templates of Avalanche, with its benchmarks and metrics: the extra ``onebasin[avalanche]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebasin.continual.strategies.base import Strategy
from onebasin.continual.streams import Task

try:
    from avalanche.training.plugins.evaluation import default_evaluator  # pyright: ignore[reportMissingImports]
    from avalanche.training.templates import SupervisedTemplate  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("this adapter needs Avalanche: pip install 'onebasin[avalanche]'") from error


class AvalancheTemplate(SupervisedTemplate):
    """A strategy of ours that Avalanche trains and evaluates: ``template.train(experience)``, ``template.eval(stream)``.

    ``strategy.fit`` learns a whole experience: plugins are called at its beginning and end, not at its steps.

    Args:
        strategy: Any of `onebasin.continual`. Its model is the template's.
        heads: Whether the classes of an experience are known, in training and evaluation (task-incremental learning).
        eval_mb_size: Examples per batch in evaluation.
        plugins: Of Avalanche.
        evaluator: Of Avalanche.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        heads: bool = False,
        eval_mb_size: int = 256,
        plugins: Sequence[Any] | None = None,
        evaluator: Any | Callable[[], Any] = default_evaluator,
    ):
        # Avalanche requires an optimiser. This one never takes a step.
        idle = torch.optim.SGD(strategy.model.parameters(), lr=0.0)
        super().__init__(
            model=strategy.model,
            optimizer=idle,
            criterion=strategy.loss,
            train_mb_size=strategy.batch_size,
            eval_mb_size=eval_mb_size,
            device=strategy.device,
            plugins=plugins,
            evaluator=evaluator,
        )
        self.strategy, self.heads = strategy, heads

    def _train_exp(self, experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
        """Learn the whole experience."""
        self.strategy.fit(read_task(experience, self.heads))

    def forward(self) -> Tensor:
        """The output; in evaluation, classes that the experience does not have get a large negative value."""
        output = super().forward()
        if not self.heads or self.is_training:
            return output
        allowed = torch.zeros(output.shape[1], dtype=torch.bool, device=output.device)
        allowed[list(_read_classes(self.experience))] = True
        return output.masked_fill(~allowed, torch.finfo(output.dtype).min / 4)


def read_task(experience: Any, heads: bool = False) -> Task:
    """All examples of an experience, with its transforms applied, in memory. Random transforms are drawn once."""
    examples = [experience.dataset[i] for i in range(len(experience.dataset))]
    inputs = torch.stack([torch.as_tensor(example[0]) for example in examples])
    targets = torch.tensor([int(example[1]) for example in examples])
    classes = _read_classes(experience) if heads else None
    return Task(inputs, targets, classes, f"experience {experience.current_experience}")


def _read_classes(experience: Any) -> tuple[int, ...]:
    classes = getattr(experience, "classes_in_this_experience", None)
    if classes is None:
        raise ValueError(
            "heads=True needs the classes of each experience: "
            "wrap the benchmark in avalanche.benchmarks.with_classes_timeline"
        )
    return tuple(sorted(classes))
