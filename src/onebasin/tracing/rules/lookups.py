"""Positions that are found by comparing entries, and looked up: routers and their experts, codebooks.

The rules in `FINDING` make `Positions`. Those in `LOOKUPS` replace the plain rules where an operand has such a mark.
"""

from __future__ import annotations

from typing import Any

from torch.export.graph_signature import InputKind
from torch.fx import Node

from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import ONE, Atom, Axes, AxisTerm, has_uniform_parts, resolve
from onebasin.tracing.positions import Counts, Offsets, Order, Positions, Sorting, find_original, pin_positions
from onebasin.tracing.rules.elementwise import RULES as ELEMENTWISE
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.rules.experts import RULES as EXPERTS
from onebasin.tracing.rules.indexing import RULES as INDEXING
from onebasin.tracing.rules.indexing import has_masks
from onebasin.tracing.rules.rearrangement import RULES as REARRANGEMENT
from onebasin.tracing.rules.reduction import RULES as REDUCTION
from onebasin.tracing.rules.reduction import reduce
from onebasin.tracing.rules.scattering import RULES as SCATTERING
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, operation_name, replace_axis

_SELECTS = "an index selects along it"
_BY_SIZE = "sorted by size"
_READ = "a position along it is read"

# ------------------------------------------------------------------------------------------------------------- finding


def topk(trace: Trace, args: Arguments) -> list[Axes]:
    """The largest entries, sorted: all entries of the axis are treated alike, unless some are equal."""
    along = _compare(trace, args, not args["sorted"])
    result = replace_axis(args.input, args.dim, trace.pinned(args.shape[args.dim], _BY_SIZE))
    return [result, Positions.make(result, along)]


def arg_extremum(trace: Trace, args: Arguments) -> Axes:
    """Where the largest or smallest entry of an axis is."""
    if not isinstance(args["dim"], int) or not args.input:
        return REDUCTION["argmax"](trace, args)
    return Positions.make(reduce(trace, args), _compare(trace, args))


def _compare(trace: Trace, args: Arguments, is_ordered: bool = False) -> AxisTerm:
    """The axis along which entries are compared. It is pinned if its order matters."""
    axis = args.input[args.dim]
    if not is_ordered and _is_comparable(args):
        trace.scope(axis)
        return axis
    trace.pin(axis, reason=_READ)
    return trace.pinned(axis.size, _READ) if has_uniform_parts(axis) else axis


def extremum(trace: Trace, args: Arguments) -> Any:
    """The largest or smallest entry of an axis, and where it is."""
    if not isinstance(args.get("dim"), int) or not args.input or not _is_comparable(args):
        return REDUCTION["max"](trace, args)
    trace.scope(args.input[args.dim])
    result = reduce(trace, args)
    return [result, Positions.make(result, args.input[args.dim])]


_KEEPING_DIFFERENCES = {
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "sigmoid", "log_sigmoid", "tanh", "exp", "log", "softplus"),
    *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "abs", "silu", "gelu"),
    *("sum", "mean", "norm", "linalg_vector_norm", "layer_norm", "rms_norm"),
    *("to", "_to_copy", "clone", "contiguous", "detach", "alias", "view", "reshape", "_unsafe_view", "flatten"),
    *("unsqueeze", "squeeze", "transpose", "permute", "t", "mT", "expand", "unflatten"),
}
"""Operations whose results differ for almost all operands that do."""
_MAKING_DIFFERENCES = {
    *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "cdist", "_euclidean_dist"),
    "cosine_similarity",
}
"""Operations whose results differ if one of their operands does, unless the other is zero."""
_MAKING_ZEROS = {"relu", "relu6", "hardtanh", "hardswish", "threshold", "clamp"}


def _is_comparable(args: Arguments) -> bool:
    """Whether the entries of the axis differ for almost all inputs and weights.

    Where some are equal the first or the last of them is found, so the order along the axis matters. Rounding, masks and
    rectifiers make entries equal, and inputs may be.
    """
    axis, scores = args.input[args.dim], bind_arguments(args.node)["self"]
    return not has_uniform_parts(axis) and _differs(scores)


def _differs(node: Node) -> bool:
    if not node.meta["val"].dtype.is_floating_point:
        return False
    if node.op == "placeholder":
        return node.meta["kind"] in (InputKind.PARAMETER, InputKind.BUFFER)
    operands = node.all_input_nodes[::-1]  # weights first: they are parameters, or close to some
    if operation_name(node) in _MAKING_DIFFERENCES:
        may_vanish = len(operands) < 3 and any(operation_name(n) in _MAKING_ZEROS for n in operands)
        return not may_vanish and any(map(_differs, operands))
    return operation_name(node) in _KEEPING_DIFFERENCES and all(map(_differs, operands))


FINDING: dict[str, Rule] = {
    "topk": topk,
    **dict.fromkeys(("argmax", "argmin"), arg_extremum),
    **dict.fromkeys(("max", "min"), extremum),
}

# ---------------------------------------------------------------------------------------------------------- looking up


def _look_up(trace: Trace, axis: AxisTerm, index: Axes) -> None:
    """Require of an axis what an index that selects along it needs."""
    if isinstance(index, Positions) and index.along.size == axis.size:
        trace.join(axis, index.along)
    else:
        pin_positions(index, trace.explain(_SELECTS))
        trace.pin(axis, reason=_SELECTS)


def index(trace: Trace, args: Arguments) -> Axes:
    """x[i, :, j]; see the plain rule. What is looked up by sorted positions keeps what belongs to each position."""
    if has_masks(args):
        return _plain(trace, args)
    axes, indices = args.input, list(args["indices"])
    indexed = [dim for dim, i in enumerate(indices) if i is not None]
    for dim in indexed:
        _look_up(trace, axes[dim], indices[dim])
    common = broadcast(trace, *(indices[dim] for dim in indexed))
    start = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    kept = [axis for dim, axis in enumerate(axes) if dim not in indexed]
    first = indices[indexed[0]]
    if len(indexed) > 1 or not isinstance(first, Positions) or first.rows is None:
        trace.scope(*kept)
    result = (*kept[:start], *common, *kept[start:])
    if not isinstance(axes, Positions):
        _require_numbers(trace, axes)
        return result
    order = first.order if isinstance(first, Sorting) and len(indexed) == 1 else None
    return Positions.make(result, axes.along, order if order is not None and order.positions is axes else None)


def index_select(trace: Trace, args: Arguments) -> Axes:
    """One index along one axis."""
    _require_numbers(trace, args.input)
    _look_up(trace, args.input[args.dim], args["index"])
    trace.scope(*replace_axis(args.input, args.dim))
    return replace_axis(args.input, args.dim, *(args["index"] or (ONE,)))


def embedding(trace: Trace, args: Arguments) -> Axes:
    """Rows of a table."""
    rows, *units = args["weight"]
    _look_up(trace, rows, args["indices"])
    trace.scope(*units)
    return (*args["indices"], *units)


def gather(trace: Trace, args: Arguments) -> Axes:
    """An index for every entry of the result."""
    axes, chosen, dim = args.input, args["index"], args.dim
    if len(axes) != len(chosen) or any(
        a.size != i.size for d, (a, i) in enumerate(zip(axes, chosen, strict=True)) if d != dim
    ):
        raise NotCovered("the index has other axes")
    _require_numbers(trace, axes)
    _look_up(trace, axes[dim], chosen)
    others = trace.join_axes(replace_axis(axes, dim), replace_axis(chosen, dim))
    trace.scope(*others)
    return (*others[:dim], chosen[dim], *others[dim:])


def scatter(trace: Trace, args: Arguments) -> Axes:
    """Written at positions along the axis itself."""
    _require_numbers(trace, args.input, args.get("src"))
    return SCATTERING["scatter"](trace, args)


def one_hot(trace: Trace, args: Arguments) -> Axes:
    """A one at a position along the axis."""
    positions = args.input
    if not isinstance(positions, Positions) or args.shape[-1] != positions.along.size:
        return _plain(trace, args)
    return (*positions, positions.along)


def histogram(trace: Trace, args: Arguments) -> Axes:
    """How often each position occurs."""
    positions, bins = args.input, (args["bins"], args["min"], args["max"])
    if not isinstance(positions, Positions) or bins != (positions.along.size, 0, positions.along.size - 1):
        return _plain(trace, args)
    return Counts.make(positions)


def cumsum(trace: Trace, args: Arguments) -> Axes:
    """Where the rows of each position end, if they are sorted."""
    return Offsets.make(args.input) if isinstance(args.input, Counts) else _plain(trace, args)


def sort(trace: Trace, args: Arguments) -> Any:
    """Rows sorted by the position they have, and the inverse of such a sorting."""
    marked = args.input
    if isinstance(marked, Sorting) and not args["descending"]:
        order = marked.order
        results = [(trace.pinned(order.rows.size, _BY_SIZE),), Positions.make((order.source,), order.rows)]
    elif isinstance(marked, Positions) and len(marked) == 1 and not args["descending"]:
        order = _sort_rows(trace, marked)
        results = [Positions.make((order.rows,), marked.along, order), Sorting.make(order)]
    else:
        return _plain(trace, args)
    return results[1] if args.operation == "argsort" else results


def _sort_rows(trace: Trace, positions: Positions) -> Order:
    (source,) = positions
    trace.pin(source, reason="its order is compared")
    rows = Atom(source.size, frozenset())
    rows.covers = positions.along
    trace.orders.append(Order(find_original(positions), rows, source, trace.explain("rows are sorted by it")))
    return trace.orders[-1]


def index_put(trace: Trace, args: Arguments) -> Axes:
    """Numbers from 0 on, written where a sorting says: the inverse of the sorting."""
    first, *others = args["indices"]
    counts_up = _counts_up(bind_arguments(args.node)["values"], args.shape[0])
    if isinstance(first, Sorting) and not others and len(args.input) == 1 and counts_up and not args["accumulate"]:
        return Positions.make((first.order.source,), first.order.rows)
    return _plain(trace, args)


def _counts_up(values: Node, number: int) -> bool:
    """Whether a tensor has the numbers from 0 to another. In a recording it is a constant."""
    made = values.meta.get("making", values)
    while operation_name(made) == "detach":
        made = made.args[0]
    return operation_name(made) == "arange" and made.args in ((number,), (0, number))


def grouped_mm(trace: Trace, args: Arguments) -> Axes:
    """Rows that are sorted by expert, each multiplied by the matrix of its own."""
    rows, weights, offsets = args.operands[:3]
    if not isinstance(offsets, Offsets) or not _are_sorted(trace, rows, offsets):
        return _plain(trace, args)
    trace.join(weights[0], offsets.positions.along)
    inner = trace.join(rows[1], weights[1])
    trace.scope(rows[0], inner)  # a row belongs to one expert, so the units of each expert may have their own order
    trace.units[args.node.name,] = weights[2]
    return (rows[0], weights[2])


def _are_sorted(trace: Trace, rows: Axes, offsets: Offsets) -> bool:
    """Whether the rows of a matrix are sorted by the positions that the offsets count."""
    original = find_original(offsets.positions)
    return any(o.positions is original and resolve(o.rows) is resolve(rows[0]) for o in trace.orders)


def carry(trace: Trace, args: Arguments) -> Any:
    """Views and casts of positions are positions."""
    marked, result = args.input, _PLAIN[args.operation.rstrip("_")](trace, args)
    is_cast = args.node.meta["val"].dtype.itemsize == 1  # to truth values, or to too few bits
    if result is marked and not is_cast:
        return result
    if isinstance(marked, Positions) and not is_cast:
        return Positions.make(result, marked.along)
    _require_numbers(trace, marked)
    return tuple(result)


def _require_numbers(trace: Trace, *operands: Axes | None) -> None:
    """Fix what the operands are positions along."""
    for operand in operands:
        pin_positions(operand, trace.explain(_READ))


def _plain(trace: Trace, args: Arguments) -> Any:
    """Use the plain rule, which reads positions as numbers."""
    pin_positions(dict(args), trace.explain(_READ))
    return _PLAIN[args.operation.rstrip("_")](trace, args)


_PLAIN: dict[str, Rule] = {**ELEMENTWISE, **REDUCTION, **REARRANGEMENT, **INDEXING, **SCATTERING, **EXPERTS}

LOOKUPS: dict[str, Rule] = {
    "index": index,
    "index_select": index_select,
    "embedding": embedding,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    "one_hot": one_hot,
    "histc": histogram,
    "cumsum": cumsum,
    **dict.fromkeys(("sort", "argsort"), sort),
    "index_put": index_put,
    **dict.fromkeys(EXPERTS, grouped_mm),
    **dict.fromkeys(("clone", "contiguous", "to", "_to_copy", "detach", "alias"), carry),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), carry),
    **dict.fromkeys(("transpose", "permute", "t", "expand", "slice", "select"), carry),
}
