"""Operations that give entries other positions: what they do to slots, by ATen name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.rules.rearrangement import RULES as REARRANGEMENT
from onebasin.tracing.slots.arguments import Rule, SlotArguments, is_filled_with_zeros, is_zero, pad
from onebasin.tracing.slots.system import Segments, Slots, SlotSystem, TensorSlots, atoms_of, list_parts
from onebasin.tracing.trace import NotCovered


def _expand(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """New axes stand in front."""
    return pad(args.input, len(args.expected))


def _repeat_interleave(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Every entry of an axis repeated in place."""
    if "input" not in args or not isinstance(args["repeats"], int) or args["dim"] is None:
        raise NotCovered("no fixed number of repeats along one axis")
    return args.input


def _reshape(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Atoms keep their order in memory."""
    has_segments = [any(isinstance(axis, Segments) for axis in tensor) for tensor in (args.input, args.expected)]
    if has_segments == [False, False]:
        return _deal(list(itertools.chain(*args.input)), args.expected)
    if has_segments == [False, True]:
        return _cut(system, list(itertools.chain(*args.input)), args.expected)
    kept = iter([axis for axis in args.input if axis])  # axes of one entry come and go, all others stay as they are
    return tuple(next(kept, ()) if wanted else () for wanted in args.expected)


def _cut(system: SlotSystem, flat: Sequence[tuple[Atom, Any]], expected: TensorSlots) -> TensorSlots:
    """An axis of equal segments, such as queries, keys and values, becomes an axis of its own and those beside it."""
    count = next(len(axis) for axis in expected if isinstance(axis, Segments))
    if len(flat) % count:
        raise NotCovered("segments of different structures")
    size = len(flat) // count
    beside = []
    for number in range(count):
        wanted = tuple(axis[number] if isinstance(axis, Segments) else axis for axis in expected)
        beside.append(_deal(flat[number * size : (number + 1) * size], wanted))
    return tuple(
        Segments(parts) if isinstance(axis, Segments) else system.equate(*parts)
        for axis, parts in zip(expected, zip(*beside, strict=True), strict=True)
    )


def _deal(flat: Sequence[tuple[Atom, Any]], expected: TensorSlots) -> TensorSlots:
    if [atom for atom, _ in flat] != [atom for slots in expected for atom, _ in slots]:
        raise NotCovered("reshaped across its structure")
    rest = iter(flat)
    return tuple(tuple(itertools.islice(rest, len(slots))) for slots in expected)


def _select_part(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A slice: along the axis that is cut the part that has the atoms of the result."""
    if len(args.expected) != len(args.input):
        return _take_entry(system, args, args["index"], args.expected)
    return tuple(_part(slots, atoms_of(wanted)) for slots, wanted in zip(args.input, args.expected, strict=True))


def _take_entry(system: SlotSystem, args: SlotArguments, index: int, expected: TensorSlots) -> TensorSlots:
    """One entry of an axis. Beside it, an axis of segments is the one of that number."""
    system.forbid(*list_parts(args.input[args.dim]))
    extent = args.node.all_input_nodes[0].meta["val"].shape[args.dim]
    if any(isinstance(axis, Segments) and len(axis) != extent for axis in args.input):
        raise NotCovered("segments of another axis")
    kept = [axis for number, axis in enumerate(args.input) if number != args.dim]
    return tuple(
        axis[index] if isinstance(axis, Segments) and not isinstance(wanted, Segments) else axis
        for axis, wanted in zip(kept, expected, strict=True)
    )


def _unbind(system: SlotSystem, args: SlotArguments) -> list[TensorSlots]:
    return [_take_entry(system, args, index, wanted) for index, wanted in enumerate(args.expected)]


def _part(slots: Slots, wanted: tuple[Atom, ...]) -> Slots:
    atoms = atoms_of(slots)
    found = [n for n in range(len(atoms) - len(wanted) + 1) if atoms[n : n + len(wanted)] == wanted]
    if len(found) != 1 and wanted:
        raise NotCovered("a part that cannot be told from others")
    return slots[found[0] : found[0] + len(wanted)] if wanted else ()


def _split(system: SlotSystem, args: SlotArguments) -> list[TensorSlots]:
    dim, result, taken = args.dim, [], 0
    for part in args.expected:
        count = len(part[dim])
        result.append((*args.input[:dim], args.input[dim][taken : taken + count], *args.input[dim + 1 :]))
        taken += count
    return result


def _concatenate(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    return _join_along(system, args, args["tensors"], args["dim"])


def _join_along(system: SlotSystem, args: SlotArguments, tensors: Sequence[TensorSlots], dim: int) -> TensorSlots:
    """Tensors one after the other. What they are beside that axis is the same, but for tensors of zeros."""
    num_axes = len(args.expected)
    filled = [tensor for tensor in tensors if len(tensor) == num_axes]  # an empty vector fits anything
    others = _leave_out_zeros(args, tensors, num_axes)
    return tuple(
        tuple(itertools.chain(*(tensor[number] for tensor in filled)))
        if number == dim % num_axes
        else system.equate(*(tensor[number] for tensor in others))
        for number in range(num_axes)
    )


def _leave_out_zeros(args: SlotArguments, tensors: Sequence[TensorSlots], num_axes: int) -> list[TensorSlots]:
    nodes = bind_arguments(args.node)["tensors"]
    found = [(tensor, node) for tensor, node in zip(tensors, nodes, strict=True) if len(tensor) == num_axes]
    return [tensor for tensor, node in found if not is_filled_with_zeros(node, args.program)] or [found[0][0]]


def _concatenate_stack(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Hstack, vstack, dstack and column_stack: missing axes have one entry."""
    number = {"hstack": 1, "dstack": 3}.get(args.operation, 2)
    tensors: list[TensorSlots] = []
    for tensor in args["tensors"]:
        if args.operation == "column_stack":
            tensors.append(tensor + ((),) * (number - len(tensor)))
        else:
            padded = pad(tensor, min(number, 2))
            tensors.append(padded + ((),) * (number - len(padded)))
    dim = {"hstack": min(1, len(args.expected) - 1), "dstack": 2, "column_stack": 1}.get(args.operation, 0)
    return _join_along(system, args, tensors, dim)


def _stack(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    tensors = _leave_out_zeros(args, args["tensors"], len(args.expected) - 1)
    joined = [system.equate(*column) for column in zip(*tensors, strict=True)]
    joined.insert(args["dim"] % len(args.expected), ())
    return tuple(joined)


def _replace_part(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A range or an entry of an axis is replaced: beside that axis, what is written changes as what is there."""
    dim, source = args.dim, args["src"]
    source = source if len(source) == len(args.input) else (*source[:dim], (), *source[dim:])
    system.forbid(args.input[dim], source[dim])
    kept = [tensor for name, tensor in (("input", args.input), ("src", source)) if not is_zero(args, name)] or [source]
    return tuple(
        args.expected[number] if number == dim else system.equate(*column)
        for number, column in enumerate(zip(*kept, strict=True))
    )


def _copy(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """The shape of one tensor, the entries of another."""
    return pad(args["src"], len(args.expected))


def _exchange(name: str) -> Rule:
    """Axes in another order, as the rule for axes has it: it does not look into them."""
    rule = REARRANGEMENT[name]
    return lambda system, args: rule(system.trace, args)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "tile"), _expand),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"),
        _reshape,
    ),
    **{
        name: _exchange(name)
        for name in ("permute", "transpose", "swapaxes", "swapdims", "mT", "t", "numpy_T", "movedim", "moveaxis")
    },
    **dict.fromkeys(("select", "slice", "narrow"), _select_part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    **dict.fromkeys(("hstack", "vstack", "row_stack", "dstack", "column_stack"), _concatenate_stack),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _replace_part),
    "copy": _copy,
    "stack": _stack,
    "unbind": _unbind,
    **dict.fromkeys(("roll", "flip"), lambda system, args: args.input),  # along axes that are pinned
}
