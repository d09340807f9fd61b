"""A user's data, and copies of models run on it."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onebasin.torch_internals import tree_leaves, tree_map

_SPLIT_SIZE = 256
Network = TypeVar("Network", bound=nn.Module)


class StopForward(Exception):
    """Raised by a hook that has seen what it wanted: the rest of the forward pass is not needed."""


def copy_model(model: nn.Module) -> nn.Module:
    """A copy that is ours to change, in eval mode."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return copy.deepcopy(model).eval()


def copy_with_state(model: Network, state: Mapping[str, Any]) -> Network:
    """A copy of a module that holds another state."""
    result = copy.deepcopy(model)
    result.load_state_dict(state)
    return result


def check_data(data: Any, needs_target: bool = False) -> Iterable[Any]:
    """A user's data as batches that can be read again and again.

    A pair of tensors (inputs, targets) of equal length is cut into batches; everything else must be an iterable of batches
    as `split_batch` takes them. One batch is read.

    Args:
        data: see above.
        needs_target: whether to refuse batches without a target.

    Raises:
        TypeError: if it is no such thing, or can be read only once.
        ValueError: if it has no batches.
    """
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        data = _read_tensors(data)
    if isinstance(data, Tensor | str | Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"data must be an iterable of (inputs, target) batches, such as a DataLoader; got {_kind(data)}")
    if isinstance(data, Iterator):
        raise TypeError(f"data is read several times, and {_kind(data)} can be read once: give a list or a DataLoader")
    first = _read_first(data)
    if first is None:
        raise ValueError("the data has no batches")
    split_batch(first, needs_target)
    return data


def _read_tensors(tensors: tuple[Tensor, ...]) -> Iterable[Any]:
    """Batches of a pair (inputs, targets); or of other tensors that are alike, as ``inputs.split(...)`` returns them."""
    if len(tensors) == 2 and all(tensor.dim() for tensor in tensors):
        inputs, targets = tensors
        if len(inputs) != len(targets):
            raise ValueError(f"data has {len(inputs)} inputs and {len(targets)} targets; it needs as many of both")
        return list(zip(inputs.split(_SPLIT_SIZE), targets.split(_SPLIT_SIZE), strict=True))
    if len({(tensor.dtype, tensor.dim(), tensor.shape[1:]) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise TypeError(f"a tuple of tensors must be a pair (inputs, targets), or like batches; got the shapes {shapes}")
    return tensors


def _read_first(data: Iterable[Any]) -> Any:
    """The first batch, None if there is none; a loader that shuffles draws from the user's generator, which is kept."""
    with torch.random.fork_rng(devices=[]):
        return next(iter(data), None)


def split_batch(batch: Any, needs_target: bool = False) -> tuple[Any, Any]:
    """The inputs and the target of a batch; None where it has no target.

    A batch is inputs, a pair (inputs, target), or a dict of keyword inputs, whose entry "labels" is the target. Inputs are
    a tensor, a tuple of arguments or a dict of keyword arguments.

    Args:
        batch: see above.
        needs_target: whether to refuse a batch without a target. In (inputs, None) the target is None.

    Raises:
        TypeError: for a tuple or list of another length, or if there is no target and one is needed.
    """
    if needs_target and not ("labels" in batch if isinstance(batch, Mapping) else _is_pair(batch)):
        raise TypeError(
            f"a batch must have a target: a pair (inputs, target), or a dict with 'labels'; got {_kind(batch)}. "
            "Where the loss needs none give (inputs, None)"
        )
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return (inputs, batch["labels"]) if "labels" in batch else (batch, None)
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) not in (1, 2):
        raise TypeError(
            f"a batch is inputs, or a pair (inputs, target); got {_kind(batch)} of {len(batch)}. "
            "Give several inputs as a tuple: ((first, second), target)"
        )
    return batch[0], batch[1] if len(batch) == 2 else None


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) > 1  # that there are no more than two is checked anyway


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def take_example(data: Iterable[Any]) -> Any:
    """Example inputs from the first batch: two rows of it where all its tensors have equally many. None if it is empty.

    >>> take_example([(torch.zeros(8, 3), torch.zeros(8))]).shape
    torch.Size([2, 3])
    """
    inputs, _ = split_batch(_read_first(data))
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    lengths = {value.shape[:1] for value in tree_leaves(inputs) if isinstance(value, Tensor)}
    if len(lengths) != 1 or lengths == {torch.Size()}:
        return inputs
    return tree_map(lambda value: value[:2] if isinstance(value, Tensor) else value, inputs)


def find_example(example_inputs: Any, data: Iterable[Any] | None) -> Any:
    """Example inputs that were given, or else those of the first batch; None if there is neither."""
    return take_example(data) if example_inputs is None and data is not None else example_inputs


def run_batches(model: nn.Module, data: Iterable[Any]) -> None:
    """Call a model on every batch, without gradients, for what its hooks and norms see."""
    num_batches = 0
    with torch.no_grad():
        for batch in data:
            with contextlib.suppress(StopForward):
                call_model(model, split_batch(batch)[0])
            num_batches += 1
    if not num_batches:
        raise ValueError("the data has no batches")


def call_model(model: nn.Module, inputs: Any, params: dict[str, Any] | None = None) -> Any:
    """The output for inputs that are a tensor, a tuple of arguments, or a dict of keywords; they are moved to the model.

    Args:
        model: to be called.
        inputs: see above.
        params: tensors in place of the model's own.
    """
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    args, kwargs = move_to(model, (args, kwargs), params)
    return model(*args, **kwargs) if params is None else torch.func.functional_call(model, params, args, kwargs)


def move_to(model: nn.Module, values: Any, params: dict[str, Any] | None = None) -> Any:
    """Inputs or targets on the device of a model, or of the tensors in place of its own."""
    tensors = model.parameters() if params is None else params.values()
    device = next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), None)
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)
