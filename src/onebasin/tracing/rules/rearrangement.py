"""Views, permutes, concatenations and cuts: entries keep their values and get another place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onebasin.tracing.axes.terms import ONE, Atom, Axes, Cases, Product, Same, Sum, Unknown, identity, resolve
from onebasin.tracing.axes.unification import cut, narrow
from onebasin.tracing.walk import Rule, Trace


def _shape(a: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in a["node"].meta["val"].shape)


def view(trace: Trace, a: dict[str, Any]) -> Axes:
    """Flatten row-major and cut anew: reshape, view, flatten and unflatten."""
    return regroup(trace, a["input"], _shape(a))


def regroup(trace: Trace, axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of a tensor after a reshape, from the innermost outwards, splitting where extents fall apart."""
    left = [axis for axis in axes if axis.size > 1]
    result: list[Unknown] = []
    for extent in reversed(shape):
        taken: list[Unknown] = []
        need = extent
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
                reason = "reshaped across its structure"
                trace.pin(axis, *left, *taken, reason=reason)
                rest = [trace.pinned(n, reason) for n in shape[: len(shape) - len(result)]]
                return (*rest, *reversed(result))
        result.append(ONE if not taken else taken[0] if len(taken) == 1 else Product(tuple(taken)))
    return tuple(reversed(result))


def permute(trace: Trace, a: dict[str, Any]) -> Axes:
    """Axes in another order."""
    return tuple(a["input"][d] for d in a["dims"])


def transpose(trace: Trace, a: dict[str, Any]) -> Axes:
    """Two axes exchanged."""
    axes = list(a["input"])
    i, j = a.get("dim0", a.get("axis0", -2)), a.get("dim1", a.get("axis1", -1))
    axes[i], axes[j] = axes[j], axes[i]
    return tuple(axes)


def reverse(trace: Trace, a: dict[str, Any]) -> Axes:
    """All axes in reverse order: ``x.T``."""
    return a["input"][::-1]


def movedim(trace: Trace, a: dict[str, Any]) -> Axes:
    """Axes moved to other places."""
    num_axes = len(a["input"])
    pairs = [[d % num_axes for d in (x if isinstance(x, (list, tuple)) else [x])] for x in (a["source"], a["destination"])]
    order = [d for d in range(num_axes) if d not in pairs[0]]
    for destination, origin in sorted(zip(pairs[1], pairs[0], strict=True)):
        order.insert(destination, origin)
    return tuple(a["input"][d] for d in order)


def squeeze(trace: Trace, a: dict[str, Any]) -> Axes:
    """Axes of extent one dropped."""
    axes, dim = a["input"], a.get("dim")
    chosen = range(len(axes)) if dim is None else [d % len(axes) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    return tuple(axis for i, axis in enumerate(axes) if i not in chosen or axis.size != 1)


def unsqueeze(trace: Trace, a: dict[str, Any]) -> Axes:
    """An axis of extent one added."""
    axes = list(a["input"])
    axes.insert(a["dim"] % (len(axes) + 1), ONE)
    return tuple(axes)


def expand(trace: Trace, a: dict[str, Any]) -> Axes:
    """Axes of extent one repeated: constant along them."""
    shape = _shape(a)
    axes = (ONE,) * (len(shape) - len(a["input"])) + a["input"]
    return tuple(axis if axis.size == n else Same(n) for axis, n in zip(axes, shape, strict=True))


def repeat(trace: Trace, a: dict[str, Any]) -> Axes:
    """Whole axes laid end to end several times."""
    times = a["repeats"] if "repeats" in a else a["dims"]
    axes = (ONE,) * (len(times) - len(a["input"])) + a["input"]
    times = (1,) * (len(axes) - len(times)) + tuple(times)
    return tuple(axis if n == 1 else Product((Same(n), axis)) for axis, n in zip(axes, times, strict=True))


def repeat_interleave(trace: Trace, a: dict[str, Any]) -> Axes:
    """Every entry of an axis several times in a row."""
    axes, times = a["input"], a["repeats"]
    if not isinstance(times, int) or a["dim"] is None:
        raise ValueError("only a fixed number of repeats along one axis is covered")
    dim = a["dim"] % len(axes)
    return tuple(Product((axis, Same(times))) if i == dim else axis for i, axis in enumerate(axes))


def cat(trace: Trace, a: dict[str, Any]) -> Axes:
    """Tensors laid end to end along one axis; their other axes are the same."""
    most = max(map(len, a["tensors"]))
    dim = a["dim"] % most
    tensors = [t for t in a["tensors"] if len(t) == most and t[dim].size > 0]
    others = trace.join_axes(*([axis for i, axis in enumerate(t) if i != dim] for t in tensors))
    parts = tuple(t[dim] if t[dim].size > 1 else Atom(1) for t in tensors)
    joined = parts[0] if len(parts) == 1 else Sum(parts)
    return (*others[:dim], joined, *others[dim:])


def stack(trace: Trace, a: dict[str, Any]) -> Axes:
    """Tensors side by side along a new axis; each keeps a structure of its own."""
    tensors = a["tensors"]
    dim = a["dim"] % (len(tensors[0]) + 1)
    if len(tensors) == 1:
        return (*tensors[0][:dim], ONE, *tensors[0][dim:])
    selector = Atom(len(tensors))
    selector.link = Sum(tuple(Atom(1) for _ in tensors))
    others = []
    for column in zip(*tensors, strict=True):
        same = len({identity(resolve(axis)) for axis in column}) == 1
        others.append(column[0] if same else Cases(selector, column))
    return (*others[:dim], selector, *others[dim:])


def split(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """Consecutive pieces of an axis: split, chunk, tensor_split."""
    axes, dim = a["input"], a["dim"] % len(a["input"])
    lengths = [int(v.shape[dim]) for v in a["node"].meta["val"]]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    cut(axes[dim], starts)
    return [narrow(axes, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def unbind(trace: Trace, a: dict[str, Any]) -> list[Axes]:
    """Every entry of an axis as a tensor."""
    axes, dim = a["input"], a["dim"] % len(a["input"])
    cut(axes[dim], range(axes[dim].size))
    pieces = [narrow(axes, dim, i, 1) for i in range(axes[dim].size)]
    return [(*p[:dim], *p[dim + 1 :]) for p in pieces]


def select(trace: Trace, a: dict[str, Any]) -> Axes:
    """One entry of an axis."""
    axes, dim = a["input"], a["dim"] % len(a["input"])
    piece = narrow(axes, dim, a["index"] % axes[dim].size, 1)
    return (*piece[:dim], *piece[dim + 1 :])


def _bounds(a: dict[str, Any], extent: int) -> tuple[int, int]:
    start, end = a.get("start"), a.get("end")
    start = 0 if start is None else max(start + extent, 0) if start < 0 else min(start, extent)
    end = extent if end is None else max(end + extent, 0) if end < 0 else min(end, extent)
    return start, max(end, start)


def slice_(trace: Trace, a: dict[str, Any]) -> Axes:
    """A range of an axis, or every k-th entry of it."""
    axes, dim, step = a["input"], a["dim"] % len(a["input"]), a.get("step") or 1
    extent = axes[dim].size
    start, end = _bounds(a, extent)
    if start == end:
        return (*axes[:dim], trace.pinned(0, "empty"), *axes[dim + 1 :])
    if step == 1:
        return axes if (start, end) == (0, extent) else narrow(axes, dim, start, end - start)
    if extent % step or start >= step or end != extent:
        reason = "sliced with a step that does not divide it"
        trace.pin(axes[dim], reason=reason)
        return (*axes[:dim], trace.pinned(_shape(a)[dim], reason), *axes[dim + 1 :])
    outer, inner = trace.split(axes[dim], step)
    split_axes = (*axes[:dim], outer, inner, *axes[dim + 1 :])
    piece = narrow(split_axes, dim + 1, start, 1)
    return (*piece[: dim + 1], *piece[dim + 2 :])


def narrow_(trace: Trace, a: dict[str, Any]) -> Axes:
    """A range of an axis, by start and length."""
    dim = a["dim"] % len(a["input"])
    return narrow(a["input"], dim, a["start"] % a["input"][dim].size, a["length"])


def slice_scatter(trace: Trace, a: dict[str, Any]) -> Axes:
    """A tensor with a range of an axis replaced."""
    axes, source, dim = a["input"], a["src"], a["dim"] % len(a["input"])
    extent = axes[dim].size
    start, end = _bounds(a, extent)
    if (a.get("step") or 1) != 1:
        raise ValueError("a slice with a step is written")
    return _replace(trace, axes, source, dim, start, end)


def select_scatter(trace: Trace, a: dict[str, Any]) -> Axes:
    """A tensor with one entry of an axis replaced."""
    axes, dim = a["input"], a["dim"] % len(a["input"])
    index = a["index"] % axes[dim].size
    source = (*a["src"][:dim], ONE, *a["src"][dim:])
    return _replace(trace, axes, source, dim, index, index + 1)


def _replace(trace: Trace, axes: Axes, source: Axes, dim: int, start: int, end: int) -> Axes:
    pieces = cut(axes[dim], [start, end])
    others = trace.join_axes(*([axis for i, axis in enumerate(t) if i != dim] for t in (axes, source)))
    written = source[dim] if source[dim].size > 1 else Atom(1)
    parts, position = [], 0
    for piece in pieces:
        parts.append(written if position == start else piece)
        position += piece.size
    joined = parts[0] if len(parts) == 1 else Sum(tuple(parts))
    return (*others[:dim], joined, *others[dim:])


def constant(trace: Trace, a: dict[str, Any]) -> Axes:
    """A tensor filled with one value."""
    return tuple(Same(n) if n > 1 else ONE for n in _shape(a))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), view),
    "permute": permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "adjoint", "mT"), transpose),
    **dict.fromkeys(("t", "numpy_T"), reverse),
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    "unbind": unbind,
    "select": select,
    "slice": slice_,
    "narrow": narrow_,
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    **dict.fromkeys(
        ("zero", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
         "new_ones", "new_full", "new_empty", "scalar_tensor"),
        constant,
    ),
}  # fmt: skip
