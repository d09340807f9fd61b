"""Operations that draw random numbers, and dropout, which can be turned off."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Graph, Node

from onebasin.programs.shapes import bind_arguments
from onebasin.torch_internals import find_schema

_OFF = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments of dropout, attention and recurrent layers, with the values that draw nothing."""
MODE_ARGUMENTS = _OFF.keys()
"""Arguments by which layers of PyTorch tell an operation whether they are in train mode."""


@functools.cache
def is_random(operation: Any) -> bool:
    """Whether an operation can draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def draws_numbers(node: Node) -> bool:
    """Whether an operation draws random numbers with the arguments it is called with."""
    if not is_random(node.target):
        return False
    switches = [bool(value) for name, value in bind_arguments(node).items() if name in _OFF]
    return all(switches)


def disable_dropout(graph: Graph) -> None:
    """Turn dropout off, wherever it is an argument of an operation."""
    for node in graph.nodes:
        if is_random(node.target):
            for position, argument in enumerate(find_schema(node.target).arguments):
                if argument.name in node.kwargs.keys() & _OFF.keys():
                    node.update_kwarg(argument.name, _OFF[argument.name])
                elif argument.name in _OFF and position < len(node.args):
                    node.update_arg(position, _OFF[argument.name])
