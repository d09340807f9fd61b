"""Square matrices with a diagonal: rows and columns are one axis."""

from __future__ import annotations

from onebasin.tracing.axes.terms import Atom, Axes, has_uniform_parts, resolve
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, insert_axis


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
    if has_uniform_parts(resolve(axis)):
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


RULES: dict[str, Rule] = {"eye": eye, "diag_embed": diag_embed, "diagonal": diagonal}
