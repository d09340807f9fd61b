"""Running copies of models over a user's data."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Enough(Exception):
    """Raised by a hook that has seen what it wanted: the rest of the forward pass is not needed."""


def copy_model(model: nn.Module) -> nn.Module:
    """A copy that is ours to change, in eval mode."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return copy.deepcopy(model).eval()


def check_rereadable(data: Iterable[Any]) -> None:
    """Refuse data that is gone after one pass."""
    if isinstance(data, Iterator):
        raise TypeError(
            f"the data is read several times, and a {type(data).__name__} can be read once: "
            "give a list of batches or a DataLoader"
        )


def run_batches(model: nn.Module, data: Iterable[Any]) -> None:
    """Call a model on every batch, without gradients, for what its hooks and norms see."""
    num_batches = 0
    with torch.no_grad():
        for batch in data:
            with contextlib.suppress(Enough):
                _call(model, batch)
            num_batches += 1
    if not num_batches:
        raise ValueError("the data has no batches")


def _call(model: nn.Module, batch: Any) -> None:
    """A batch is inputs, or a pair (inputs, target)."""
    inputs = batch
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise TypeError(f"a batch is inputs, or a pair (inputs, target); got a {type(batch).__name__} of {len(batch)}")
        inputs = batch[0]
    call_model(model, inputs)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The output for inputs that are a tensor, a tuple of arguments, or a dict of keywords; they are moved to the model."""
    device = next((p.device for p in model.parameters()), None)

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(inputs, Mapping):
        return model(**{name: move(value) for name, value in inputs.items()})
    if isinstance(inputs, tuple | list):
        return model(*(move(value) for value in inputs))
    return model(move(inputs))
