"""Values of a recording that follow from integers and booleans of the call alone.

A module runs on tensors without values, but sizes and branches may depend on values: edges without loops, the number of
nodes. No parameter and no rounding changes those that follow from integer inputs, so they are computed where they are asked
for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.noise import is_random
from onebasin.programs.shapes import is_exact, iterate_leaves, make_empty, map_leaves, run_operation

_aten = torch.ops.aten
_SIZING = {
    _aten.index.Tensor: 1,
    _aten.masked_select.default: 1,
    _aten.repeat_interleave.self_Tensor: 1,
    _aten.repeat_interleave.Tensor: 0,
    _aten.nonzero.default: 0,
    _aten.nonzero_numpy.default: 0,
    _aten.where.default: 0,
    _aten.bincount.default: 0,
    _aten._unique2.default: 0,
    _aten.unique_consecutive.default: 0,
}
"""Operations whose results have sizes that depend on values, with the position of the argument that has these values."""


class IntegerValues:
    """The nodes of a graph whose values are known, and these values."""

    def __init__(self) -> None:
        self._known: set[Node] = set()
        self._varying: set[Node] = set()  # those that follow from inputs, not from constants alone
        self._values: dict[Node, Any] = {}

    def add_input(self, node: Node, kind: InputKind, tensor: Tensor) -> None:
        """Add a placeholder. Its value is known if it is an input of the call or a constant, of integers or booleans."""
        is_given = kind in (InputKind.USER_INPUT, InputKind.CONSTANT_TENSOR)
        if is_given and is_exact(tensor) and not tensor.is_meta:
            self._known.add(node)
            self._values[node] = tensor
            if kind == InputKind.USER_INPUT:
                self._varying.add(node)

    def add(self, node: Node) -> None:
        """Add an operation. Its result is known if all of its operands are."""
        operands, results = node.all_input_nodes, list(iterate_leaves(node.meta["val"]))
        is_known = bool(operands) and self._known.issuperset(operands) and not is_random(node.target)
        if is_known and all(r is None or (isinstance(r, Tensor) and is_exact(r)) for r in results):
            self._known.add(node)
            if not self._varying.isdisjoint(operands):
                self._varying.add(node)

    def knows(self, nodes: Any) -> bool:
        """Whether the values of all nodes among some arguments are known."""
        return all(n in self._known for n in iterate_leaves(nodes) if isinstance(n, Node))

    def varies(self, nodes: Any) -> bool:
        """Whether the known value of some node among the arguments depends on inputs of the call."""
        return any(n in self._varying for n in iterate_leaves(nodes) if isinstance(n, Node))

    def find(self, node: Node) -> Any:
        """The value of a node that is known."""
        pending = [node]
        while pending:
            needed = [n for n in pending[-1].all_input_nodes if n not in self._values]
            if not needed:
                current = pending.pop()
                if current not in self._values:
                    arguments = map_arg((current.args, current.kwargs), self._values.__getitem__)
                    self._values[current] = run_operation(current.target, *arguments)
            pending += needed
        return self._values[node]

    def compute(self, func: Any, nodes: Any) -> Any:
        """Run an operation on arguments that are known."""
        return run_operation(func, *map_arg(nodes, self.find))

    def compute_sizes(self, func: Any, nodes: Any) -> Any:
        """What an operation returns whose sizes depend on values, without other values; None if those are not known."""
        args, position = nodes[0], _SIZING.get(func)
        if position is None or position >= len(args) or not self.knows(args[position]):
            return None
        device = next(self.find(n).device for n in iterate_leaves(args[position]) if isinstance(n, Node))

        def convert(node: Node) -> Tensor:
            return self.find(node) if node in self._known else make_empty(node.meta["val"], device)

        return map_leaves(run_operation(func, *map_arg(nodes, convert)), Tensor, make_empty)
