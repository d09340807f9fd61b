"""Values that are made of one vector of the state: gains as they are, and those of norms that multiply by 1 + w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.trace import Trace, operation_name

_COPIES = ("to", "_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh", "lift_fresh_copy")
"""Operations whose result has the entries of their operand."""


class Source(NamedTuple):
    """What a value is made of.

    Attributes:
        key: of the vector.
        offset: what is added to it; None if the value is another function of the vector.
    """

    key: str
    offset: float | None


@dataclass(frozen=True)
class Vectors:
    """The vectors of a state in the programs of a trace.

    Attributes:
        sources: of the values that are made of one vector alone, by the nodes of the programs.
        offsets: for the vectors that are never read but with one number added to them, that number.
    """

    sources: Mapping[Node, Source]
    offsets: Mapping[str, float]

    def find_shifted(self, node: Node) -> str | None:
        """The vector to which a node adds its number; None if it does not."""
        source = self.sources.get(node)
        if source is None or source.offset is None or operation_name(node) != "add":
            return None
        return source.key if source.key in self.offsets else None


def find_vectors(trace: Trace) -> Vectors:
    """Follow the vectors of the state through all programs of a trace."""
    sources: dict[Node, Source] = {}
    offsets: dict[str, set[float | None]] = {}
    for program, _ in trace.walks:
        sources |= _follow(program, trace)
        for node in program.graph.nodes:
            for operand in node.all_input_nodes:
                if operand in sources and not _is_kept(node, sources):
                    offsets.setdefault(sources[operand].key, set()).add(sources[operand].offset)
    single = ((key, *found) for key, found in offsets.items() if len(found) == 1)
    return Vectors(sources, {key: offset for key, offset in single if offset})


def _follow(program: Program, trace: Trace) -> dict[Node, Source]:
    found: dict[Node, Source] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() != 1:
            continue
        if node.name in program.keys:
            key = program.keys[node.name]
            found[node] = Source(trace.aliases.get(key, key), 0.0)
        elif made_of := {found[operand].key if operand in found else None for operand in node.all_input_nodes}:
            (key, *others) = made_of
            if key is not None and not others:
                found[node] = Source(key, _find_offset(node, found))
    return found


def _find_offset(node: Node, sources: Mapping[Node, Source]) -> float | None:
    """What a node, and all before it, add to a vector; None if they do more than that."""
    (operand, *others) = node.all_input_nodes
    before = sources[operand].offset
    if before is None or others or operation_name(node) in _COPIES:
        return before if not others else None
    if operation_name(node) != "add":
        return None
    number, alpha = (bind_arguments(node).get(name) for name in ("other", "alpha"))
    return before + number if isinstance(number, int | float) and alpha in (None, 1) else None


def _is_kept(node: Node, sources: Mapping[Node, Source]) -> bool:
    """Whether a node only copies a vector or adds a number to it, so that what reads the node reads the sum."""
    return node in sources and sources[node].offset is not None
