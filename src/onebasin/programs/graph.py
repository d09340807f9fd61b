"""The operations of one call as a graph on named parameters, which can be replayed with other parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.failures import describe_error
from onebasin.programs.isolation import LOCK
from onebasin.programs.noise import draws_numbers
from onebasin.tensors.seeding import seeded
from onebasin.torch_internals import tree_leaves


@dataclass(frozen=True)
class FrontEnd:
    """What made a program.

    Attributes:
        name: "recording" or "export".
        reason: for an export, why the recording was not used.
    """

    name: str
    reason: str = ""


class ReplayError(RuntimeError):
    """An operation of a program failed on the values it was given."""


@dataclass(frozen=True)
class Program:
    """The operations of one call.

    Attributes:
        graph: the operations, in order. ``meta["val"]`` of a node is a tensor with the shape and type of its result, or a
            list of those. ``meta["module"]`` is the path of the module that called it, and a name for that call. A constant
            has ``meta["making"]``, a node of another graph, if it is known how it was made, or ``meta["kept"]``, its value,
            if a module keeps it.
        inputs: what each placeholder stands for: its kind, and its state key or its name.
        given: the values of placeholders that are not in the state: inputs of the call, and constants.
        front_end: what made the program.
        training: whether the module was in train mode.
        reads_sizes: whether the module's Python code may depend on the sizes of tensors.
        lines_reading_integers: the lines of code whose branches or sizes depend on values of integer inputs.
        output_names: of the tensors that the call returns, in order; empty if they are not known.
    """

    graph: torch.fx.Graph
    inputs: dict[str, tuple[InputKind, str]]
    given: dict[str, Any]
    front_end: FrontEnd
    training: bool = False
    reads_sizes: bool = True
    lines_reading_integers: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """The state keys of the placeholders that stand for parameters and buffers of the state."""
        return {name: key for name, (kind, key) in self.inputs.items() if kind in (InputKind.PARAMETER, InputKind.BUFFER)}

    @property
    def reads(self) -> set[str]:
        """The state keys that some operation reads."""
        return {self.keys[node.name] for node in self.graph.nodes if node.name in self.keys and node.users}

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether some operation draws random numbers."""
        return any(map(draws_numbers, self.graph.nodes))

    @functools.cached_property
    def _last_reads(self) -> dict[Node, list[Node]]:
        """For each operation the values that no later operation reads."""
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
        given: Sequence[Mapping[str, Any]] = (),
        kept: dict[Node, Any] | None = None,
    ) -> list[Tensor]:
        """Replay the call with another state, without gradients, and return the tensors that it returns.

        Args:
            state: its tensors are read where they are used, so only a few of a lazy state are held at a time.
            compute: runs an operation.
            convert: is applied to every tensor that is read.
            given: replay the call for each of these, in place of the values that the program was given; what all of them
                return comes in one list. A tensor of the state is read once for all.
            kept: filled with what every operation returns. If None, a value is dropped after the last operation that reads
                it.

        Raises:
            ReplayError: if an operation fails.
        """
        replays: list[dict[Node, Any]] = [{} for _ in given or [self.given]] if kept is None else [kept]
        with torch.no_grad(), _same_numbers() if self.is_random else contextlib.nullcontext():
            for node in self.graph.nodes:
                read = {n: convert(state[self.keys[n.name]]) for n in node.all_input_nodes if n.name in self.keys}
                if node.op == "output":
                    found = [map_arg(node.args, (values | read).__getitem__) for values in replays]
                    return [value for value in tree_leaves(found) if isinstance(value, Tensor)]
                for values, inputs in zip(replays, given or [self.given], strict=True):
                    if node.op == "placeholder":
                        values[node] = convert(inputs.get(node.name))
                        continue
                    args, kwargs = map_arg((node.args, node.kwargs), lambda n, v=values, r=read: r[n] if n in r else v[n])
                    try:
                        values[node] = compute(node.target, args, kwargs)
                    except Exception as error:
                        raise ReplayError(f"{node.target} failed: {describe_error(error)}") from error
                    for dead in self._last_reads.get(node, ()) if kept is None else ():
                        del values[dead]
        raise AssertionError("a graph without an output")


@contextlib.contextmanager
def _same_numbers() -> Iterator[None]:
    with LOCK, seeded(0):
        yield
