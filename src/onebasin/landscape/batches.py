"""Running copies of models over a user's data."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.torch_internals import tree_leaves, tree_map


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


def take_example(data: Iterable[Any]) -> Any:
    """Example inputs from the first batch: two rows of it where all its tensors have equally many. None if it is empty.

    >>> take_example([(torch.zeros(8, 3), torch.zeros(8))]).shape
    torch.Size([2, 3])
    """
    batch = next(iter(data), None)
    inputs = _inputs(batch)
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    lengths = {value.shape[:1] for value in tree_leaves(inputs) if isinstance(value, Tensor)}
    if len(lengths) != 1 or lengths == {torch.Size()}:
        return inputs
    return tree_map(lambda value: value[:2] if isinstance(value, Tensor) else value, inputs)


def run_batches(model: nn.Module, data: Iterable[Any]) -> None:
    """Call a model on every batch, without gradients, for what its hooks and norms see."""
    num_batches = 0
    with torch.no_grad():
        for batch in data:
            with contextlib.suppress(Enough):
                call_model(model, _inputs(batch))
            num_batches += 1
    if not num_batches:
        raise ValueError("the data has no batches")


def _inputs(batch: Any) -> Any:
    """A batch is inputs, or a pair (inputs, target)."""
    if not isinstance(batch, tuple | list):
        return batch
    if len(batch) not in (1, 2):
        raise TypeError(f"a batch is inputs, or a pair (inputs, target); got a {type(batch).__name__} of {len(batch)}")
    return batch[0]


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
