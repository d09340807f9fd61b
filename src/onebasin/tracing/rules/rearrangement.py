"""Views, permutes, concatenations and cuts: entries keep their values and get another position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebasin.tracing.axes.terms import ONE, Atom, Axes, AxisTerm, Product, Sum, Uniform, identity, resolve
from onebasin.tracing.axes.unification import cut, narrow, piecewise
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace, insert_axis, replace_axis


def view(trace: Trace, args: Arguments) -> Axes:
    """Flatten row-major and cut anew: reshape, view, flatten and unflatten."""
    num_entries = math.prod(axis.size for axis in args.input)
    if num_entries == 0 or num_entries != math.prod(args.shape):
        raise NotCovered("it is empty, or its number of entries changes")
    return _regroup(trace, args.input, args.shape)


def _regroup(trace: Trace, axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of a tensor after a reshape, from the innermost outwards, split where extents differ."""
    left = [axis for axis in axes if axis.size > 1]
    extents = list(shape)
    result: list[AxisTerm] = []
    while extents:
        taken: list[AxisTerm] = []
        need = extents.pop()
        while need > 1:
            axis = left.pop()
            if need % axis.size == 0:
                taken.insert(0, axis)
                need //= axis.size
            elif axis.size % need == 0:
                outer, inner = trace.split(axis, need)
                left.append(outer)
                taken.insert(0, inner)
                need = 1
            else:
                result += _pin_block(trace, left, axis, extents, need, taken)
                break
        else:
            result.append(ONE if not taken else taken[0] if len(taken) == 1 else Product(tuple(taken)))
    return tuple(reversed(result))


def _pin_block(
    trace: Trace, left: list[AxisTerm], axis: AxisTerm, extents: list[int], need: int, taken: list[AxisTerm]
) -> Axes:
    """Pin the axes that a reshape cuts across, up to where old and new axes end together; returns the new ones reversed.

    The relative shift of positions, (t, 2t) -> (2t, t), cuts across two axes and leaves batch and heads alone.
    """
    made = [need * math.prod(a.size for a in taken)]
    block, old, new = [*taken, axis], axis.size, need
    while old != new:
        if old < new:
            block.append(left.pop())
            old *= block[-1].size
        else:
            made.append(extents.pop())
            new *= made[-1]
    return trace.scramble(block, made, "reshaped across its structure")


def transpose(trace: Trace, args: Arguments) -> Axes:
    """Two axes exchanged."""
    axes = list(args.input)
    if axes:
        i, j = (args.axis(args.get(f"dim{k}", args.get(f"axis{k}", k - 2))) for k in (0, 1))
        axes[i], axes[j] = axes[j], axes[i]
    return tuple(axes)


def movedim(trace: Trace, args: Arguments) -> Axes:
    """Axes moved to other positions."""
    pairs = [
        [args.axis(dim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
        for dims in (args["destination"], args["source"])
    ]
    order = [dim for dim in range(len(args.input)) if dim not in pairs[1]]
    for destination, source in sorted(zip(*pairs, strict=True)):
        order.insert(destination, source)
    return tuple(args.input[dim] for dim in order)


def squeeze(trace: Trace, args: Arguments) -> Axes:
    """Axes of extent one dropped."""
    dropped = set() if args.get("dim") == [] else args.axes(args.get("dim"))
    return tuple(axis for i, axis in enumerate(args.input) if i not in dropped or axis.size != 1)


def expand(trace: Trace, args: Arguments) -> Axes:
    """Axes of extent one repeated: uniform along them."""
    return _expand(args.input, args.shape)


def _expand(axes: Axes, shape: Sequence[int]) -> Axes:
    padded = (ONE,) * (len(shape) - len(axes)) + axes
    return tuple(axis if axis.size == n else repeated(axes, n) for axis, n in zip(padded, shape, strict=True))


def repeated(axes: Axes, times: int) -> AxisTerm:
    """An axis along which a tensor with other axes is repeated. If it is the same along all of them, it is filled."""
    return Uniform(times, repeats=not all(axis.size == 1 or isinstance(resolve(axis), Uniform) for axis in axes))


def repeat(trace: Trace, args: Arguments) -> Axes:
    """Whole axes repeated one after the other."""
    times = args["repeats"] if "repeats" in args else args["dims"]
    axes = (ONE,) * (len(times) - len(args.input)) + args.input
    times = (1,) * (len(axes) - len(times)) + tuple(times)
    return tuple(axis if n == 1 else Product((repeated(axes, n), axis)) for axis, n in zip(axes, times, strict=True))


def repeat_interleave(trace: Trace, args: Arguments) -> Axes:
    """Every entry of an axis repeated in place."""
    times = args["repeats"]
    if "input" not in args or not isinstance(times, int) or args["dim"] is None:
        raise NotCovered("only a fixed number of repeats along one axis is covered")
    return replace_axis(args.input, args.dim, Product((args.input[args.dim], repeated(args.input, times))))


def concatenate(trace: Trace, tensors: Sequence[Axes], dim: int) -> Axes:
    """Tensors one after the other along one axis; their other axes are the same."""
    num_axes = max(map(len, tensors))
    dim %= num_axes
    filled = [axes for axes in tensors if len(axes) == num_axes and axes[dim].size > 0]
    if not filled:
        raise NotCovered("it is empty")
    others = trace.join_axes(*(replace_axis(axes, dim) for axes in filled))
    parts = tuple(axes[dim] if axes[dim].size > 1 else Atom(1) for axes in filled)
    return insert_axis(others, dim, parts[0] if len(parts) == 1 else resolve(Sum(parts)))


def concatenate_stack(trace: Trace, args: Arguments) -> Axes:
    """Hstack, vstack, dstack and column_stack: tensors with missing axes filled in, one after the other."""
    tensors: list[Axes] = args["tensors"]
    if args.operation == "hstack":
        return concatenate(trace, [axes or (ONE,) for axes in tensors], min(1, max(map(len, tensors)) - 1))
    if args.operation == "column_stack":
        return concatenate(trace, [axes if len(axes) > 1 else (*(axes or (ONE,)), ONE) for axes in tensors], 1)
    filled = [axes if len(axes) > 1 else (ONE, *(axes or (ONE,))) for axes in tensors]
    if args.operation == "dstack":
        return concatenate(trace, [axes if len(axes) > 2 else (*axes, ONE) for axes in filled], 2)
    return concatenate(trace, filled, 0)


def channel_shuffle(trace: Trace, args: Arguments) -> Axes:
    """Channels (group, channel) become (channel, group)."""
    batch, channels, *spatial = args.input
    group, inside = trace.split(channels, channels.size // args["groups"])
    return (batch, Product((inside, group)), *spatial)


def stack_tensors(tensors: Sequence[Axes], dim: int) -> Axes:
    """Tensors side by side along a new axis; each keeps a structure of its own."""
    if len(tensors) == 1:
        return insert_axis(tensors[0], dim, ONE)
    selector = Atom(len(tensors))
    selector.link = Sum(tuple(Atom(1) for _ in tensors))
    others = []
    for column in zip(*tensors, strict=True):
        is_same = len({identity(resolve(axis)) for axis in column}) == 1
        others.append(column[0] if is_same else piecewise(selector, column))
    return insert_axis(others, dim, selector)


def split(trace: Trace, args: Arguments) -> list[Axes]:
    """Consecutive pieces of an axis: split, chunk, tensor_split."""
    dim = args.dim
    lengths = [shape[dim] for shape in args.shapes]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    cut(args.input[dim], starts)
    return [_narrow(trace, args.input, dim, *bounds) for bounds in zip(starts, lengths, strict=True)]


def _narrow(trace: Trace, axes: Axes, dim: int, start: int, length: int) -> Axes:
    if length == 0:
        return replace_axis(axes, dim, trace.pinned(0, "empty"))
    return axes if length == axes[dim].size else narrow(axes, dim, start, length)


def unbind(trace: Trace, args: Arguments) -> list[Axes]:
    """Every entry of an axis as a tensor."""
    size = args.input[args.dim].size
    cut(args.input[args.dim], range(size))
    return [select_entry(args.input, args.dim, i) for i in range(size)]


def select_entry(axes: Axes, dim: int, index: int) -> Axes:
    """One entry of an axis."""
    return replace_axis(narrow(axes, dim, index % axes[dim].size, 1), dim)


def _bounds(args: Arguments, extent: int) -> tuple[int, int]:
    start, end, _ = slice(args.get("start"), args.get("end")).indices(extent)
    return start, max(end, start)


def slice_(trace: Trace, args: Arguments) -> Axes:
    """A range of an axis, or every k-th entry of it."""
    axes, dim, step = args.input, args.dim, args.get("step") or 1
    extent = axes[dim].size
    start, end = _bounds(args, extent)
    if step == 1 or start == end:
        return _narrow(trace, axes, dim, start, end - start)
    if not _steps_through(extent, start, end, step):
        reason = "sliced with a step that does not divide it"
        trace.pin(axes[dim], reason=reason)
        return replace_axis(axes, dim, trace.pinned(args.shape[dim], reason))
    split_axes = replace_axis(axes, dim, *trace.split(axes[dim], step))
    return select_entry(split_axes, dim + 1, start)


def narrow_(trace: Trace, args: Arguments) -> Axes:
    """A range of an axis, by start and length."""
    if not isinstance(args["start"], int):
        raise NotCovered("the start is a tensor")
    start, _ = _bounds(args, args.input[args.dim].size)
    return _narrow(trace, args.input, args.dim, start, args["length"])


def slice_scatter(trace: Trace, args: Arguments) -> Axes:
    """A tensor with a range of an axis replaced, or every k-th entry of it."""
    axes, dim, step, source = args.input, args.dim, args.get("step") or 1, args["src"]
    extent = axes[dim].size
    start, end = _bounds(args, extent)
    if start == end:
        return axes
    if step == 1:
        return _replace(trace, axes, source, dim, start, end)
    if not _steps_through(extent, start, end, step):
        raise NotCovered("a slice is written with a step that does not divide the axis")
    split_axes = replace_axis(axes, dim, *trace.split(axes[dim], step))
    written = _replace(trace, split_axes, insert_axis(source, dim + 1, ONE), dim + 1, start, start + 1)
    return (*written[:dim], Product(written[dim : dim + 2]), *written[dim + 2 :])


def _steps_through(extent: int, start: int, end: int, step: int) -> bool:
    """Whether a slice has one entry of each run of `step` entries, at the same place in each."""
    return extent % step == 0 and start < step and end == extent


def select_scatter(trace: Trace, args: Arguments) -> Axes:
    """A tensor with one entry of an axis replaced."""
    dim = args.dim
    index = args["index"] % args.input[dim].size
    return _replace(trace, args.input, insert_axis(args["src"], dim, ONE), dim, index, index + 1)


def _replace(trace: Trace, axes: Axes, source: Axes, dim: int, start: int, end: int) -> Axes:
    pieces = cut(axes[dim], [start, end])
    others = trace.join_axes(*(replace_axis(tensor, dim) for tensor in (axes, source)))
    parts, position = [], 0
    for piece in pieces:
        new = source[dim] if source[dim].size > 1 else Atom(1)
        parts.append(new if position == start else piece)
        position += piece.size
    return insert_axis(others, dim, parts[0] if len(parts) == 1 else resolve(Sum(tuple(parts))))


def count(trace: Trace, args: Arguments) -> Axes:
    """Numbers that differ along their axis: arange, linspace and logspace."""
    return tuple(trace.pinned(n, "a constant that varies") for n in args.shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), view),
    "permute": lambda trace, args: tuple(args.input[dim] for dim in args["dims"]),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "adjoint", "mT"), transpose),
    **dict.fromkeys(("t", "numpy_T"), lambda trace, args: args.input[::-1]),
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    "squeeze": squeeze,
    "unsqueeze": lambda trace, args: insert_axis(args.input, args["dim"], ONE),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    "broadcast_tensors": lambda trace, args: [_expand(axes, args.shape) for axes in args["tensors"]],
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(
        ("cat", "concat", "concatenate"), lambda trace, args: concatenate(trace, args["tensors"], args["dim"])
    ),
    **dict.fromkeys(("hstack", "vstack", "row_stack", "dstack", "column_stack"), concatenate_stack),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), channel_shuffle),
    "stack": lambda trace, args: stack_tensors(args["tensors"], args["dim"]),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    "unbind": unbind,
    "select": lambda trace, args: select_entry(args.input, args.dim, args["index"]),
    "slice": slice_,
    "narrow": narrow_,
    "slice_scatter": slice_scatter,
    **dict.fromkeys(("arange", "linspace", "logspace"), count),
    "select_scatter": select_scatter,
    **dict.fromkeys(
        ("zero", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
         "new_ones", "new_full", "new_empty", "scalar_tensor"),
        lambda trace, args: tuple(ONE if n == 1 else Uniform(n) for n in args.shape),
    ),
}  # fmt: skip
