"""One call of a module, read from example inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onebasin.torch_internals import tree_leaves


@dataclass(frozen=True)
class Call:
    """One call of a module: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The arguments, and what lists, tuples and dicts among them hold."""
        return tree_leaves((self.args, self.kwargs))


def list_outputs(result: Any) -> list[Any]:
    """What a call returned, and what lists, tuples, dicts and dataclasses among it hold."""
    found = []
    for leaf in tree_leaves(result):
        is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        found += list_outputs(list(vars(leaf).values())) if is_record else [leaf]
    return found


def name_outputs(result: Any) -> list[str]:
    """For each of what `list_outputs` lists, the name of the entry of a dict or dataclass that it is in; or "output"."""
    leaves = list_outputs(result)
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    entries = dict(result) if isinstance(result, Mapping) else vars(result) if is_record else {}
    named = [(str(name), leaf) for name, value in entries.items() for leaf in list_outputs(value)]
    is_complete = len(named) == len(leaves) and all(leaf is each for (_, leaf), each in zip(named, leaves, strict=True))
    return [name for name, _ in named] if is_complete else ["output"] * len(leaves)


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
