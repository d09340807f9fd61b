"""Square matrices with a diagonal: rows and columns are one axis."""

from __future__ import annotations

from torch.fx import Node

from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import Atom, Axes, Uniform, has_uniform_parts, resolve
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, insert_axis, operation_name


def eye(trace: Trace, args: Arguments) -> Axes:
    """The identity matrix is the same if rows and columns move together."""
    rows, columns = args.shape
    if rows != columns or rows < 2:
        raise NotCovered("the matrix is not square")
    axis = Atom(rows, frozenset())
    return (axis, axis)


def diag_embed(trace: Trace, args: Arguments) -> Axes:
    """Vectors as the diagonals of matrices."""
    if args["offset"]:
        raise NotCovered("it is not the main diagonal")
    *batch, axis = args.input
    if has_uniform_parts(axis):
        raise NotCovered("a diagonal of equal numbers is not the same along its rows")
    trace.scope(axis)
    first, second = sorted(dim % len(args.shape) for dim in (args["dim1"], args["dim2"]))
    return insert_axis(insert_axis(batch, first, axis), second, axis)


def diagonal(trace: Trace, args: Arguments) -> Axes:
    """The diagonals of matrices: the two axes are one, and stand last."""
    dims = [args.axis(args[name]) for name in ("dim1", "dim2")]
    if args["offset"] or args.input[dims[0]].size != args.input[dims[1]].size:
        raise NotCovered("it is not the main diagonal of square matrices")
    axis = trace.join(*(args.input[dim] for dim in dims))
    trace.scope(axis)
    return (*(a for dim, a in enumerate(args.input) if dim not in dims), axis)


def writes_diagonal(args: Arguments) -> bool:
    """Whether an index_put writes x[i, i] for every i, with an index that is made by counting."""
    indices, axes = bind_arguments(args.node)["indices"], args.input
    return len(indices) == 2 and axes[0].size == axes[1].size > 1 and all(_counts(i, axes[0].size) for i in indices)


def _counts(index: Node | None, size: int) -> bool:
    """Whether an index is arange(size)."""
    if index is None:
        return False
    made = index.meta.get("making", index)
    while operation_name(made) in ("detach", "alias", "clone"):
        made = made.args[0]
    if operation_name(made) != "arange":
        return False
    arguments = bind_arguments(made)
    return not arguments.get("start") and arguments.get("step", 1) == 1 and tuple(made.meta["val"].shape) == (size,)


def write_diagonal(trace: Trace, args: Arguments) -> Axes:
    """x[i, i] = values[i] for every i: a depthwise filter is written so, into zeros."""
    rows, columns, *kept = args.input
    axis, *kept = broadcast(trace, (trace.join(rows, columns), *kept), args["values"])
    if isinstance(resolve(axis), Uniform):  # the diagonal differs from the rest
        axis = Atom(axis.size, frozenset())
    trace.scope(axis)
    trace.scope(*kept)
    return (axis, axis, *kept)


RULES: dict[str, Rule] = {"eye": eye, "diag_embed": diag_embed, "diagonal": diagonal}
