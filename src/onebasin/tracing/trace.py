"""What a walk over programs has found so far, and what a rule is given and may say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.symmetries import Pin
from onebasin.tensors.states import Ties
from onebasin.torch_internals import find_schema
from onebasin.tracing.axes import unification
from onebasin.tracing.axes.scopes import Settled, enforce
from onebasin.tracing.axes.terms import ONE, Atom, Axes, AxisTerm, is_filled, leaves
from onebasin.tracing.positions import Order


class NotCovered(Exception):
    """What a rule raises for a use of its operation that it does not cover. All that the operation touches is pinned."""


class Trace:
    """The axes of every parameter, and what the operations require of them.

    Args:
        ties: state keys that are one tensor.

    Attributes:
        aliases: for each tied key, the first of them.
        state: the axes of each parameter and statistic, by state key.
        reached: the keys that some operation reads.
        read: for each key the atoms whose entries the outputs of some call depend on.
        idle: atoms that the current operation sums over, and multiplies by nothing but constants that are filled along them.
        unmet: all such atoms so far.
        scopes: axes that one operation reads side by side.
        settled: see `solve_scopes`.
        orders: rows that are sorted by positions along an axis that may move.
        units: the output channels of operations with weights, by the names of the weights.
        outputs: the axes of what the calls return.
        modules: the result of each call of a module: its path, the number of the call, the axes, whether it is the first of
            several results.
        walks: the programs that were walked, each with the axes of the results of its operations.
        mismatch: the reason to pin axes that the current operation joins, and that have different structures.
    """

    def __init__(self, ties: Ties = ()):
        self.ties = ties
        self.aliases = {key: keys[0] for keys in ties for key in keys}
        self.state: dict[str, Axes] = {}
        self.reached: set[str] = set()
        self.read: dict[str, set[Atom]] = {}
        self.idle: set[Atom] = set()
        self.unmet: set[Atom] = set()
        self.scopes: list[Axes] = []
        self.settled: dict[int, Settled] = {}
        self.orders: list[Order] = []
        self.units: dict[tuple[str, ...], AxisTerm] = {}
        self.outputs: list[AxisTerm] = []
        self.modules: list[tuple[str, int, Axes, bool]] = []
        self.walks: list[tuple[Program, Mapping[Node, Any]]] = []
        self.enter("", "")

    def enter(self, operation: str, module: str) -> None:
        """Name the operation that the next reasons are about, and the module that calls it."""
        self.mismatch = Pin("joined with an axis of another structure", operation, module)
        self.idle = set()

    def explain(self, reason: str) -> Pin:
        """A reason to pin axes, with the current operation."""
        return replace(self.mismatch, reason=reason)

    def pin(self, *axes: AxisTerm, reason: str) -> None:
        """Fix axes, because of the current operation."""
        for axis in axes:
            unification.pin(axis, self.explain(reason))

    def scramble(self, axes: Iterable[AxisTerm], sizes: Iterable[int], reason: str) -> Axes:
        """Fix axes whose entries go to positions that no term describes, and make axes of these sizes for them."""
        for axis in axes:
            unification.scramble(axis, self.explain(reason))
        return tuple(unification.scrambled(size, self.explain(reason)) for size in sizes)

    def pinned(self, size: int, reason: str) -> AxisTerm:
        """Make an axis that cannot move."""
        return unification.pinned(size, self.explain(reason))

    def join(self, *axes: AxisTerm) -> AxisTerm:
        """Make axes equal and return the result. Axes of size one are broadcast, and left out."""
        wide = [axis for axis in axes if axis.size != 1]
        result = wide[0] if wide else ONE
        for other in wide[1:]:
            result = unification.join(result, other, self.mismatch)
        return result

    def join_axes(self, *tensors: Sequence[AxisTerm]) -> Axes:
        """Make tensors of one shape equal, axis by axis, parents before children."""
        result = list(tensors[0])
        for other in tensors[1:]:
            result = unification.join_all(zip(result, other, strict=True), self.mismatch)
        return tuple(result)

    def split(self, axis: AxisTerm, inner: int) -> Axes:
        """Split an axis into a product (outer, inner). It is pinned if its structure does not allow that."""
        halves = unification.split(axis, inner) or unification.split_segments(axis, inner)
        if halves is not None:
            return halves
        return self.scramble([axis], [axis.size // inner, inner], "reshaped across its structure")

    def sum_over(self, *axes: AxisTerm) -> None:
        """Say that an operation sums products over these axes, which were joined: note what met filled factors only."""
        for number, axis in enumerate(axes):
            others = axes[:number] + axes[number + 1 :]
            if any(map(is_filled, others)):
                self.idle.update(set(leaves(axis)).difference(*map(leaves, others)))

    def pin_order(self, axes: Axes, dims: Collection[int], reason: str) -> None:
        """Fix axes of a tensor along which an operation moves entries: what stands beside them is no longer aligned."""
        self.pin(*(axes[dim] for dim in dims), reason=reason)
        self.scope(*(axis for dim, axis in enumerate(axes) if dim not in dims))

    def scope(self, *axes: AxisTerm) -> None:
        """Say that these axes are aligned in one operation, and no others are."""
        wide = tuple(axis for axis in axes if axis.size != 1)
        self.scopes.append(wide)
        enforce(wide)


class Arguments(dict[str, Any]):
    """The arguments of an operation by the names of its schema (``self`` is called ``input``), tensors as `Axes`."""

    def __init__(self, values: Mapping[str, Any], node: Node):
        super().__init__(values)
        self.node = node

    def name(self, argument: str) -> str:
        """The names of the nodes that an argument consists of."""
        return str(bind_arguments(self.node)[argument])

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return operation_name(self.node)

    @property
    def operands(self) -> list[Axes]:
        """The tensors among the arguments."""
        return [value for value in self.values() if isinstance(value, tuple)]

    @property
    def input(self) -> Axes:
        """The first operand."""
        return self["input"]

    @property
    def dim(self) -> int:
        """The argument ``dim``, as an axis of the input counted from the front."""
        return self.axis(self["dim"])

    def axis(self, dim: Any) -> int:
        """An axis of the input, counted from the front."""
        if not isinstance(dim, int) or not self.input:
            raise NotCovered(f"{dim!r} is not one of its axes")
        return dim % len(self.input)

    def axes(self, dims: Any) -> set[int]:
        """Some axes of the input, counted from the front; for None or an empty list, all of them."""
        if dims is None or dims == [] or not self.input:
            return set(range(len(self.input)))
        return {self.axis(dim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results; one if the operation returns a single tensor."""
        values = self.node.meta["val"]
        return [tuple(map(int, value.shape)) for value in (values if isinstance(values, (list, tuple)) else [values])]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.shapes[0]

    @property
    def returns_several(self) -> bool:
        """Whether the operation returns a list of tensors."""
        return not isinstance(self.node.meta["val"], Tensor)


Rule = Callable[[Trace, Arguments], Any]
"""Constrains the axes of the operands and returns the axes of the result, or a list of those. Raises `NotCovered` for uses
that it does not cover; any other exception is a bug."""


def replace_axis(axes: Sequence[AxisTerm], dim: int, *new: AxisTerm) -> Axes:
    """The axes of a tensor with one of them replaced by others, or dropped."""
    return (*axes[:dim], *new, *axes[dim + 1 :])


def insert_axis(axes: Sequence[AxisTerm], dim: int, new: AxisTerm) -> Axes:
    """The axes of a tensor with a new one, which may be counted from the back."""
    dim %= len(axes) + 1
    return (*axes[:dim], new, *axes[dim:])


def operation_name(node: Node) -> str:
    """The name of an operation in its schema, without the overload."""
    schema = find_schema(node.target)
    return schema.name.split("::")[-1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def iterate_tensors(value: Any) -> Iterator[Any]:
    """Yield what stands for a tensor, a tuple with an entry for each axis, in a value or a list of values."""
    if isinstance(value, tuple):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from iterate_tensors(entry)
