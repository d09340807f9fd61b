"""Reads and writes at positions that an index or a mask names: what they require of slots, by ATen name.

The axis that an index selects along cannot move, or moves with what the index looks up: nothing else may happen along it.
Along all other axes entries keep their places. An index or a mask that is the same everywhere along such an axis commutes
with any matrix there, and one that differs with factors of single units alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from onebasin.tracing.rules.indexing import has_masks
from onebasin.tracing.slots.arguments import Rule, SlotArguments, equate_operands, is_zero, pad, weigh
from onebasin.tracing.slots.system import SlotSystem, TensorSlots
from onebasin.tracing.trace import NotCovered


def _index(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """x[i, :, j], or x[:, mask]."""
    taken = _find_indexed(system, args)
    system.forbid(*(args.input[dim] for dim in taken))
    start = _find_start(taken)
    kept = [axis for dim, axis in enumerate(args.input) if dim not in taken]
    num_made = len(args.expected) - len(kept)
    return (*kept[:start], *args.expected[start : start + num_made], *kept[start:])


def _find_indexed(system: SlotSystem, args: SlotArguments) -> list[int]:
    """The axes of the input that indices or a mask select along."""
    indices = list(args["indices"])
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    system.forbid(*(axis for dim in indexed for axis in indices[dim]))
    if not has_masks(args):
        return indexed
    if len(indexed) > 1:
        raise NotCovered("a mask selects beside another index")
    return list(range(indexed[0], indexed[0] + len(indices[indexed[0]])))


def _find_start(taken: Sequence[int]) -> int:
    """Where the axes of indices stand in the result: in the place of the first, or in front if they are not adjacent."""
    return taken[0] if list(taken) == list(range(taken[0], taken[-1] + 1)) else 0


def _index_select(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    dim = args.dim
    system.forbid(args.input[dim], *args["index"])
    return (*args.input[:dim], args.expected[dim], *args.input[dim + 1 :])


def _gather(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """An index for every entry of the result."""
    dim, index = args.dim, args["index"] if "index" in args else args["indices"]
    if len(index) != len(args.input):
        raise NotCovered("the index has another number of axes")
    system.forbid(args.input[dim])
    return _replace(weigh(system, index, args.input), args, [dim])


def _scatter(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """An index for every entry of what is written, or added to what is there."""
    dim, index, source = args.dim, args["index"], args.get("src", args.get("value"))
    if args.get("reduce") not in (None, "sum", "mean"):
        raise NotCovered("neither a sum nor a mean")
    if len(index) != len(args.input):
        raise NotCovered("the index has another number of axes")
    system.forbid(args.input[dim], *(source[dim : dim + 1] if isinstance(source, tuple) else ()))
    written = _join(system, args, "src" if "src" in args else "value", args.input, source, [dim])
    return _replace(weigh(system, index, written), args, [dim])


def _index_add(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """One index along one axis, for all entries of the others."""
    dim, source = args.dim, args["source"]
    if len(source) != len(args.input):
        raise NotCovered("the source has another number of axes")
    system.forbid(args.input[dim], source[dim], *args["index"])
    return _replace(_join(system, args, "source", args.input, source, [dim]), args, [dim])


def _join(
    system: SlotSystem, args: SlotArguments, name: str, target: TensorSlots, source: Any, along: Collection[int]
) -> TensorSlots:
    """What is written to, with what is written: they change in the same way beside the axes that are written along."""
    if is_zero(args, name):
        return target
    if not isinstance(source, tuple):
        raise NotCovered("another number than zero")
    if is_zero(args, "input"):
        return source
    pairs = enumerate(zip(target, source, strict=True))
    return tuple(() if number in along else system.equate(*pair) for number, pair in pairs)


def _replace(tensor: TensorSlots, args: SlotArguments, along: Collection[int]) -> TensorSlots:
    """A result along whose axes, but for some, entries have kept their places."""
    return tuple(args.expected[number] if number in along else axis for number, axis in enumerate(tensor))


def _index_put(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """x[i, :, j] = values, which are broadcast; or x[:, mask] = number."""
    taken = _find_indexed(system, args)
    if has_masks(args):
        return _fill_masked(system, args, taken)
    start = _find_start(taken)
    kept = [axis for dim, axis in enumerate(args.input) if dim not in taken]
    num_chosen = max(len(args["indices"][dim]) for dim in taken)
    values = pad(args["values"], len(kept) + num_chosen)
    system.forbid(*(args.input[dim] for dim in taken), *values[start : start + num_chosen])
    written = iter(_join(system, args, "values", tuple(kept), (*values[:start], *values[start + num_chosen :]), ()))
    return tuple(args.expected[dim] if dim in taken else next(written) for dim in range(len(args.input)))


def _fill_masked(system: SlotSystem, args: SlotArguments, taken: Sequence[int]) -> TensorSlots:
    (mask,) = (index for index in args["indices"] if index is not None)
    if len(args["values"]) > 1 or not is_zero(args, "values"):
        raise NotCovered("another number than zero")
    chosen = (*((),) * taken[0], *mask, *((),) * (len(args.input) - taken[-1] - 1))
    return weigh(system, chosen, args.input)


def choose(condition: str, names: Collection[str], ignored: Collection[float] = (0.0,)) -> Rule:
    """Entries of several operands, by a condition that nothing changes.

    Args:
        condition: the name of an argument.
        names: of the operands.
        ignored: see `equate_operands`.
    """
    return lambda system, args: weigh(system, args[condition], equate_operands(system, args, names, ignored))


RULES: dict[str, Rule] = {
    "index": _index,
    "index_select": _index_select,
    **dict.fromkeys(("gather", "take_along_dim"), _gather),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
    **dict.fromkeys(("index_add", "index_copy"), _index_add),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    "where": choose("condition", ("input", "other")),
    "masked_fill": choose("mask", ("input", "value")),
}
