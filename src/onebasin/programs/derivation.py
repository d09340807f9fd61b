"""Calls derived from one call: at other values of its inputs, and at other batch sizes and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node

from onebasin.programs.calls import Call
from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments, is_exact
from onebasin.torch_internals import find_schema, tree_map

Limits = Mapping[int, int]
"""For the identity of an input that holds indices, how many values are valid."""


def resize(call: Call, limits: Limits | None = None) -> Iterator[Call]:
    """Calls at other sizes, the one that says most first: a module may not take all of them.

    The batch is the first axis: one sample, or two in place of one. Sequences, which are indices (batch, length) or features
    (batch, length, width), have one more position. Images are twice as high, and one column wider or twice as wide. If the
    module does not take those, all axes that are as long as a sequence are longer, as those of masks are, or the last axes
    are, as in waveforms and in features (batch, width, length), or one size changes alone. All values are drawn: equal ones
    would hide differences.
    """
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.dim()]
    batch: Sizes = {(None, 0, t.shape[0]): 1 if t.shape[0] > 1 else 2 for t in tensors[:1] if t.shape[0]}
    lengths, doubled = _lengthen(tensors, _SEQUENCES), {key: 2 * key[-1] for key in _lengthen(tensors, _IMAGES)}
    extents = {extent for *_, extent in lengths}
    masks = {key: n + 1 for key in sorted(_list_keys(tensors)) if (n := key[-1]) in extents}
    others = [
        lengths | doubled | _lengthen(tensors, _WIDTHS),
        lengths | doubled,
        lengths,
        masks,
        _lengthen(tensors, _LAST),
    ]
    changes = [
        *(batch | change for change in others if change),
        *({key: n} for key, n in (batch | lengths | doubled).items()),
    ]
    for number, change in enumerate(changes):
        if change not in changes[:number]:
            yield _resize(call, change, limits or {})


def redraw(call: Call, limits: Limits) -> Call:
    """The same call at other values of its inputs, drawn at random."""
    return _resize(call, {}, limits)


def draw_inputs(program: Program) -> dict[str, Any]:
    """The values that a program is given, with those of the call drawn at random.

    Integers stay as they are if the operations depend on their values.
    """
    limits, generator = find_limits(program), torch.Generator().manual_seed(0)

    def draw(name: str, value: Any) -> Any:
        is_fixed = program.lines_reading_integers and isinstance(value, Tensor) and is_exact(value)
        return value if is_fixed or not _is_input(program, name) else _draw(value, limits.get(id(value)), generator)

    return {name: draw(name, value) for name, value in program.given.items()}


def perturb_inputs(program: Program) -> dict[str, Any]:
    """The values that a program is given, with floating ones of the call up to half smaller or larger."""
    generator = torch.Generator().manual_seed(0)

    def perturb(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value * (0.5 + torch.rand(value.shape, generator=generator)).to(value)

    return {name: perturb(value) if _is_input(program, name) else value for name, value in program.given.items()}


def find_limits(program: Program) -> dict[int, int]:
    """How many values are valid for each input whose values are indices: the rows of the smallest table that they index."""
    found: dict[int, int] = {}
    for node in program.graph.nodes:
        value = program.given.get(node.name)
        is_index = node.op == "placeholder" and _is_input(program, node.name) and _is_index(value)
        if is_index and (rows := list(_find_rows(node))):
            found[id(value)] = min(rows)
    return found


_KEEPING_VALUES = {
    *("view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "transpose", "permute", "contiguous", "clone", "to"),
    *("slice", "select", "detach", "alias", "_to_copy", "unflatten", "t", "expand_as", "view_as", "long", "int"),
}


def _find_rows(node: Node) -> Iterator[int]:
    """The sizes of the axes that a node, or the same values in another shape, is an index of."""
    for user in node.users:
        schema = find_schema(user.target)
        name = schema.name.removeprefix("aten::") if schema is not None else ""
        if name in _KEEPING_VALUES and user.args[0] is node:
            yield from _find_rows(user)
        elif name == "embedding" and (arguments := bind_arguments(user))["indices"] is node:
            yield arguments["weight"].meta["val"].shape[0]
        elif name == "index_select" and (arguments := bind_arguments(user))["index"] is node:
            yield arguments["self"].meta["val"].shape[arguments["dim"]]
        elif name == "index":
            arguments = bind_arguments(user)
            yield from (arguments["self"].meta["val"].shape[i] for i, n in enumerate(arguments["indices"]) if n is node)


def _is_input(program: Program, name: str) -> bool:
    return program.inputs[name][0] == InputKind.USER_INPUT


def _is_index(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return is_exact(value) and value.dtype != torch.bool


_NUM_DRAWN = 65_537
"""A prime."""
Kind = tuple[bool, int]
"""Whether a tensor holds integers, and how many axes it has."""
Sizes = dict[tuple[Kind | None, int, int], int]
"""New extents by the kind of a tensor (None for all), the axis, and the extent that it has."""

_SEQUENCES = {(False, 3): [1], (True, 2): [1]}
_IMAGES = {(False, 4): [2, 3], (False, 5): [2, 3, 4]}
_WIDTHS = {(False, 4): [3], (False, 5): [4]}
_LAST = {(False, 2): [1], (False, 3): [2], (True, 2): [1]}


def _kind(tensor: Tensor) -> Kind:
    return is_exact(tensor), tensor.dim()


def _list_keys(tensors: Iterable[Tensor]) -> set[tuple[Kind | None, int, int]]:
    """All axes but the first."""
    return {(_kind(tensor), axis, n) for tensor in tensors for axis, n in enumerate(tensor.shape) if axis and n}


def _lengthen(tensors: Iterable[Tensor], axes: Mapping[Kind, Sequence[int]]) -> Sizes:
    """Sizes by which these axes of tensors have one more entry."""
    keys = ((kind, axis, n) for kind, axis, n in _list_keys(tensors) if kind and axis in axes.get(kind, ()))
    return {key: key[-1] + 1 for key in sorted(keys)}


def _resize(call: Call, sizes: Sizes, limits: Limits) -> Call:
    generator = torch.Generator().manual_seed(0)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        kind, own = _kind(leaf), list(enumerate(leaf.shape))
        shape = [sizes.get((kind, axis, extent), sizes.get((None, axis, extent), extent)) for axis, extent in own]
        if _holds_numbers(leaf):
            return _draw_numbers(shape, generator).to(leaf)
        resized = leaf
        for (axis, extent), size in zip(own, shape, strict=True):
            if size != extent:
                resized = resized.index_select(axis, torch.arange(size, device=leaf.device) % extent)
        return _draw(resized, limits.get(id(leaf)), generator)

    return Call(*tree_map(convert, (call.args, call.kwargs)))


def _draw(value: Any, limit: int | None, generator: torch.Generator) -> Any:
    """Normal numbers, valid indices, or zeros and ones for a mask, whose first column stays: some of it must be left."""
    if not _can_draw(value):
        return value
    if _holds_numbers(value):
        return _draw_numbers(value.shape, generator).to(value)
    if value.is_complex():
        return torch.randn(value.shape, generator=generator, dtype=torch.complex64).to(value)
    low, high = (min(0, int(value.min())), int(value.max())) if _is_index(value) else (0, 1)
    low, high = (low, high) if limit is None else (0, limit - 1)
    is_mask = limit is None and _is_mask(value)
    if high <= low:
        return value
    drawn = torch.randint(low, high + 1, value.shape, generator=generator).to(value)
    return torch.cat([value[..., :1], drawn[..., 1:]], -1) if is_mask and value.dim() else drawn


def _draw_numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal numbers; large tensors repeat some, at a distance that no axis has, since drawing all would take longer."""
    size = math.prod(shape)
    drawn = torch.randn(min(size, _NUM_DRAWN), generator=generator)
    return drawn.repeat(-(-size // _NUM_DRAWN))[:size].view(*shape) if size > _NUM_DRAWN else drawn.view(*shape)


def _can_draw(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided and value.numel() > 0


def _holds_numbers(value: Any) -> bool:
    """Whether a tensor holds real numbers, which are drawn whatever they are."""
    return _can_draw(value) and value.is_floating_point() and not _is_mask(value)


def _is_mask(value: Tensor) -> bool:
    """Whether it holds zeros and ones, and both of them if they are no integers."""
    if value.dtype == torch.bool:
        return True
    first = value[(0,) * value.dim()]  # what decides in most cases, without a look at all of it
    if not ((first == 0) | (first == 1)) or not bool(((value == 0) | (value == 1)).all()):
        return False
    return not value.is_floating_point() or bool(value.min() != value.max())
