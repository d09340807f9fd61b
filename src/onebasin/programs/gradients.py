"""Gradients of a call in the tensors of a state, of which a few are in memory at a time.

The call is replayed forwards, and what its operations return is kept. Then each operation is computed once more by itself,
the last one first, and gives the gradients of its operands. So a tensor of the state is read where an operation needs it,
and its gradient is complete, and given away, as soon as the first operation that reads it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.programs.noise import draws_numbers
from onebasin.programs.precision import STATISTICS_NORMS, compute_in_float64, promote
from onebasin.torch_internals import tree_leaves, tree_map


def iterate_gradients(
    program: Program, state: Mapping[str, Tensor], start: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The gradient of a weighted sum of all outputs, in float64, in each tensor of the state that they depend on.

    No gradient goes through operations that draw random numbers, or into the running statistics of norms.

    Args:
        program: the call.
        state: to replay it with.
        start: the weights of an output.

    Returns:
        Keys, each with its gradient.

    Raises:
        ReplayError: if an operation fails.
    """
    values: dict[Node, Any] = {}
    program.run(state, compute_in_float64, promote, kept=values)
    nodes = list(program.graph.nodes)
    reads = Counter(program.keys[n.name] for node in nodes for n in node.all_input_nodes if n.name in program.keys)
    found: dict[str, Tensor] = {}
    arrived: dict[Node, list[Tensor | None]] = {}  # for each tensor of a value the gradient, as far as it is known

    def read(node: Node) -> Any:
        return promote(state[program.keys[node.name]]) if node.name in program.keys else values[node]

    def add(node: Node, gradients: list[Tensor | None]) -> None:
        if node.name in program.keys:
            key = program.keys[node.name]
            for gradient in (each for each in gradients if each is not None):
                found[key] = found[key] + gradient if key in found else gradient
        else:
            known = arrived.get(node) or [None] * len(gradients)
            arrived[node] = [_add(one, other) for one, other in zip(known, gradients, strict=True)]

    for node in reversed(nodes):
        if node.op == "output":
            for result in node.all_input_nodes:
                add(result, [start(value) if _is_inexact(value) else None for value in _list_tensors(read(result))])
        elif node.op != "placeholder" and (after := arrived.pop(node, None)) is not None and not draws_numbers(node):
            statistics = node.args[3:5] if node.target in STATISTICS_NORMS else ()
            operands = {n: read(n) if n in statistics else tree_map(_begin, read(n)) for n in node.all_input_nodes}
            for operand, gradients in _differentiate(node, operands, after).items():
                add(operand, gradients)
        values.pop(node, None)
        for key in [program.keys[n.name] for n in node.all_input_nodes if n.name in program.keys]:
            reads[key] -= 1
            if not reads[key] and key in found:
                yield key, found.pop(key)


def _differentiate(node: Node, operands: Mapping[Node, Any], after: list[Tensor | None]) -> dict[Node, list[Tensor | None]]:
    """The gradients of the operands of an operation, from those of its results."""
    given: Any = map_arg((node.args, node.kwargs), operands.__getitem__)
    args, kwargs = given
    with torch.enable_grad():
        if node.target is torch.ops.aten.copy.default:
            result = _copy(*args)
        else:
            result = compute_in_float64(node.target, args, kwargs)
    pairs = [
        (value, gradient)
        for value, gradient in zip(_list_tensors(result), after, strict=True)
        if gradient is not None and value.requires_grad
    ]
    leaves = {operand: [leaf for leaf in _list_tensors(value) if leaf.requires_grad] for operand, value in operands.items()}
    wanted = [leaf for some in leaves.values() for leaf in some]
    if not pairs or not wanted:
        return {}
    results, gradients = zip(*pairs, strict=True)
    by_leaf = dict(zip(map(id, wanted), torch.autograd.grad(results, wanted, gradients, allow_unused=True), strict=True))
    return {n: [by_leaf.get(id(leaf)) for leaf in _list_tensors(value)] for n, value in operands.items()}


def _copy(onto: Tensor, value: Tensor, *_: Any) -> Tensor:
    """An assignment to a slice, as recorded; PyTorch's operation for it has no derivative."""
    return value.to(onto.dtype).expand_as(onto)


def _begin(value: Any) -> Any:
    """A tensor as an operand whose gradient is wanted."""
    return value.detach().requires_grad_() if _is_inexact(value) else value


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
