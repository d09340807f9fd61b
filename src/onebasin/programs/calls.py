"""One call of a module: read from example inputs, or derived from another call at other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebasin.torch_internals import tree_leaves, tree_map


@dataclass(frozen=True)
class Call:
    """One call of a module: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The arguments, and what lists, tuples and dicts among them hold."""
        return tree_leaves((self.args, self.kwargs))


def read_calls(example_inputs: Any) -> list[Call]:
    """Read a tensor, a tuple of tensors, a dict of keyword tensors, or a list of those, as calls.

    Raises:
        TypeError: for anything else.
    """
    entries = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not entries:
        raise ValueError("example_inputs is empty: give at least one call")
    calls = []
    for entry in entries:
        if isinstance(entry, Mapping):
            calls.append(Call((), dict(entry)))
        elif isinstance(entry, tuple):
            calls.append(Call(entry, {}))
        elif isinstance(entry, Tensor):
            calls.append(Call((entry,), {}))
        else:
            raise TypeError(
                "example_inputs must be a tensor, a tuple of positional arguments, a dict of keyword arguments, "
                f"or a list of those; got {type(entry).__name__}"
            )
    return calls


def derive_calls(call: Call) -> Iterator[Call]:
    """Calls at other sizes: all sizes larger by one, then each size alone.

    The sizes are the batch (the first axis) and the lengths of sequences: the second axis of indices (batch, length) and of
    features (batch, length, width). Floating inputs and indices are drawn at random: equal ones would hide differences.
    """
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = [(0, tensors[0].shape[0])] if tensors else []
    sizes += sorted({(1, tensor.shape[1]) for tensor in tensors if _is_sequence(tensor)})
    if len(sizes) > 1:
        yield _enlarge(call, sizes)
    for size in sizes:
        yield _enlarge(call, [size])


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.dim() == (3 if tensor.is_floating_point() else 2)


def _enlarge(call: Call, sizes: list[tuple[int, int]]) -> Call:
    generator = torch.Generator().manual_seed(0)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for axis, extent in sizes:
            if leaf.dim() > axis and leaf.shape[axis] == extent and (axis == 0 or _is_sequence(leaf)):
                leaf = torch.cat([leaf, leaf.narrow(axis, 0, 1)], axis)
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf)
        largest = int(leaf.max()) if leaf.numel() and not leaf.is_meta else 0
        return torch.randint(largest + 1, leaf.shape, generator=generator).to(leaf) if largest > 1 else leaf

    return Call(*tree_map(convert, (call.args, call.kwargs)))
