"""A call of a module, and its operations as a graph on named parameters, which can be replayed."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.shapes import is_random
from onebasin.tensors.seeding import seeded
from onebasin.torch_internals import tree_leaves


@dataclass(frozen=True)
class Call:
    """One call of the model: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read_calls(example_inputs: Any) -> list[Call]:
    """A tensor, a tuple of tensors, a dict of keyword tensors, or a list of those, as calls.

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


@dataclass(frozen=True)
class Program:
    """The operations of one call.

    Attributes:
        graph: the operations, in order. ``meta["val"]`` of a node is a tensor of the shape and type of its result, or a list
            of those, ``meta["module"]`` the path of the module that called it, and a name of that one call of the module.
        inputs: what each placeholder stands for: its kind, and its state key or its name.
        given: the values of placeholders that are not of the state: inputs of the call, and constants.
    """

    graph: torch.fx.Graph
    inputs: dict[str, tuple[InputKind, str]]
    given: dict[str, Any]

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """The state keys of placeholders that are of the state."""
        return {name: key for name, (kind, key) in self.inputs.items() if kind in (InputKind.PARAMETER, InputKind.BUFFER)}

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether some operation draws random numbers."""
        return any(is_random(node.target) for node in self.graph.nodes)

    @functools.cached_property
    def _last_reads(self) -> dict[Node, list[Node]]:
        """For each operation the values that nobody reads after it."""
        last = {value: node for node in self.graph.nodes for value in node.all_input_nodes}
        found: dict[Node, list[Node]] = {}
        for value, node in last.items():
            found.setdefault(node, []).append(value)
        return found

    def run(
        self,
        state: Mapping[str, Tensor],
        compute: Callable[[Any, Any, Any], Any] = lambda operation, args, kwargs: operation(*args, **kwargs),
        convert: Callable[[Any], Any] = lambda value: value,
    ) -> list[Tensor]:
        """Replay the call with other tensors of the state; what it returns. Nothing is differentiated.

        Args:
            state: its tensors are read where they are used: of a lazy one only a few are held at a time.
            compute: does an operation.
            convert: is applied to every tensor that is read.
        """
        values: dict[Node, Any] = {}

        def read(node: Node) -> Any:
            return convert(state[self.keys[node.name]]) if node.name in self.keys else values[node]

        with torch.inference_mode(), seeded(0) if self.is_random else contextlib.nullcontext():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    values[node] = convert(self.given.get(node.name))
                elif node.op == "output":
                    return [value for value in tree_leaves(map_arg(node.args, read)) if isinstance(value, Tensor)]
                else:
                    values[node] = compute(node.target, *map_arg((node.args, node.kwargs), read))
                for dead in self._last_reads.get(node, ()):
                    del values[dead]
        raise AssertionError("a graph without an output")


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, without the fused attention path, and restore every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module, _ in modes:
            module.training = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's warnings and logs about its own internals to itself: what matters comes as an exception."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")]
    were_disabled = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled
