"""Targets for those who have inputs and no labels: the mean of what the networks themselves give for an input.

A label says which class is the first. The scores of two networks also say how the others follow, and that is much of what
their average has to keep (distillation, Hinton et al. 2015). Inputs that stand in for real ones are all but solved by every
network, so their labels teach little; their scores may teach more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import call_model, check_data, copy_model, split_batch
from onebasin.matching.problem import MovedBatches
from onebasin.tensors.states import read_state


def mean_scores(models: Sequence[nn.Module], data: Iterable[Any]) -> Iterable[tuple[Any, Tensor]]:
    """Inputs with the mean of the outputs of some models as their targets.

    Permutations, scales and bases leave the outputs of a model as they are. So its scores on the inputs of a batch are known
    before it is aligned, and an average of models can be asked for their mean: take it as `data`, with
    `torch.nn.functional.mse_loss` as the loss of `onebasin.Midpoint` or `onebasin.RandomPoint`. No labels are needed.

    Args:
        models: of the same inputs, left untouched. Their outputs are tensors of one shape, or mappings with such
            ``"logits"``.
        data: batches of inputs; targets, if there are any, are left out. They are read again at each reading, so inputs may
            be augmented anew.

    Returns:
        Pairs (inputs, mean output), computed as they are read, on the device and in the type of the models.

    Raises:
        TypeError: if a model is no module, or the data no batches that can be read again and again.
        ValueError: if there are no models or no batches, or the outputs differ in shape.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    >>> data = ob.mean_scores([a, b], [torch.randn(32, 4) for _ in range(4)])
    >>> line = ob.RandomPoint(nn.functional.mse_loss, low=0.3, high=0.7)
    >>> merged = ob.merge([a, b], objective=line, data=data, kinds="positive", scaling=ob.Scaling(steps=5))
    """
    if not models:
        raise ValueError("mean scores are those of at least one model")
    batches = check_data(data)
    kind = _SizedScores if isinstance(batches, Sized) else _Scores
    computing = [(copy_model(model).requires_grad_(False), read_state(model)) for model in models]
    scores = kind([(model.to(state.dtype), state.device, state.dtype) for model, state in computing], batches)
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws from the user's generator
        next(iter(scores))
    return scores


class _Scores:
    def __init__(self, models: list[tuple[nn.Module, torch.device, torch.dtype]], data: Iterable[Any]):
        self.models, self.data = models, data

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in self.data:
            inputs, _ = split_batch(batch)
            yield inputs, self._score(inputs)

    @torch.no_grad()
    def _score(self, inputs: Any) -> Tensor:
        scores = []
        for model, device, dtype in self.models:
            (moved,) = MovedBatches([inputs], device, dtype)
            output = call_model(model, moved)
            scores.append(output.get("logits") if isinstance(output, Mapping) else output)
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in scores]
        if not all(isinstance(each, Tensor) for each in scores) or len(set(shapes)) > 1:
            raise ValueError(f"the outputs of the models must be tensors of one shape, got {', '.join(map(str, shapes))}")
        return torch.stack(scores).mean(0)


class _SizedScores(_Scores):
    def __len__(self) -> int:
        assert isinstance(self.data, Sized)
        return len(self.data)
