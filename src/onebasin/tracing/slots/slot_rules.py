"""Operations that multiply, add and rearrange: what they require of slots, by ATen name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.rules.contraction import Letters, einsum_letters, matmul_letters
from onebasin.tracing.rules.rearrangement import RULES as REARRANGEMENT
from onebasin.tracing.slots.system import Segments, Slots, SlotSystem, TensorSlots, atoms_of, list_parts
from onebasin.tracing.trace import Arguments, NotCovered


class SlotArguments(Arguments):
    """The arguments of an operation by the names of its schema, tensors as `TensorSlots`.

    Attributes:
        expected: the result with its atoms, as a constant.
        program: of the operation.
    """

    def __init__(self, values: Mapping[str, Any], node: Node, expected: Any, program: Program):
        super().__init__(values, node)
        self.expected, self.program = expected, program

    @property
    def input(self) -> Any:
        """The slots of the first operand."""
        return self["input"]

    def key(self, argument: str) -> str | None:
        """The state key of an argument that is a parameter or buffer by itself."""
        node = bind_arguments(self.node).get(argument)
        return self.program.keys.get(node.name) if isinstance(node, Node) else None


Rule = Callable[[Any, SlotArguments], Any]
"""Adds what an operation requires to a system, and returns the slots of the result. Where the result has other atoms than
expected, or the rule raises `NotCovered`, everything along the axes of the operands is forbidden."""


def keep(system: SlotSystem, args: SlotArguments) -> Any:
    """Every entry keeps its place, and the operation commutes with what the reading is about."""
    return [args.input, *args.expected[1:]] if isinstance(args.expected, list) else args.input


def _keep_linear(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Padding, by zeros or by entries."""
    if args.get("value") not in (None, 0, 0.0):
        raise NotCovered("padded with another number than zero")
    return args.input


def _read_shape(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """One number everywhere, in the shape of another tensor whose values are not read."""
    return args.expected


def _expand(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """New axes stand in front."""
    return ((),) * (len(args.expected) - len(args.input)) + args.input


def _repeat_interleave(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Every entry of an axis repeated in place."""
    if "input" not in args or not isinstance(args["repeats"], int) or args["dim"] is None:
        raise NotCovered("no fixed number of repeats along one axis")
    return args.input


def align_operands(args: SlotArguments) -> list[list[Slots]]:
    """For each axis of an elementwise result the slots of the operands that have it."""
    num_axes = len(args.expected)
    operands = [value for value in args.values() if isinstance(value, tuple)]
    padded = [((),) * (num_axes - len(value)) + value for value in operands]
    return [list(column) for column in zip(*padded, strict=True)]


def add_operands(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A sum; a number that is added changes what is added to."""
    added = args.get("other")
    if isinstance(added, int | float) and added != 0:
        raise NotCovered("a number is added")
    return tuple(system.equate(*column) for column in align_operands(args))


def _multiply_operands(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    result = []
    for first, *others in align_operands(args):
        for other in others:
            first = system.multiply(first, other)
        result.append(first)
    return tuple(result)


def _contract(system: SlotSystem, operands: Sequence[tuple[TensorSlots, Letters]], result: Letters) -> TensorSlots:
    found: dict[Hashable, list[Slots]] = {}
    for tensor, letters in operands:
        for slots, letter in zip(tensor, letters, strict=True):
            found.setdefault(letter, []).append(slots)
    kept: dict[Hashable, Slots] = {}
    for letter, several in found.items():
        *first, last = several
        product = _multiply_all(system, first)
        if letter in result:
            kept[letter] = system.multiply(product, last) if first else last
        elif first:
            system.contract(product, last)
        else:
            system.sum_over(last)
    return tuple(kept[letter] for letter in result)


def _multiply_all(system: SlotSystem, several: Sequence[Slots]) -> Slots:
    product: Slots = ()
    for slots in several:
        product = system.multiply(product, slots)
    return product


def _add_bias(system: SlotSystem, product: TensorSlots, axis: int, bias: TensorSlots | None) -> TensorSlots:
    """A bias along one axis; along all others it is constant."""
    if bias is None:
        return product
    axis %= len(product)
    return tuple(system.equate(slots, bias[0] if number == axis else ()) for number, slots in enumerate(product))


def _linear(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    batch = [("batch", i) for i in range(len(args.input) - 1)]
    if len(args["weight"]) != 2:
        raise NotCovered("a weight that is a vector")
    product = _contract(system, [(args.input, [*batch, "in"]), (args["weight"], ["out", "in"])], [*batch, "out"])
    return _add_bias(system, product, -1, args.get("bias"))


def _matmul(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    return _contract(system, [(x, left), (y, right)], result)


def _addmm(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    added, x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    product = _contract(system, [(x, left), (y, right)], result)
    padded = ((),) * (len(product) - len(added)) + added
    return tuple(system.equate(*pair) for pair in zip(product, padded, strict=True))


def _einsum(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    letters, result = einsum_letters(args["equation"], [len(value) for value in args["tensors"]])
    return _contract(system, list(zip(args["tensors"], letters, strict=True)), result)


def _convolution(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    x, weight, groups = args.input, args["weight"], args["groups"]
    num_spatial = len(weight) - 2
    *batch, channels = x[: len(x) - num_spatial]
    transposed = args.get("transposed", "transpose" in args.operation)
    inside, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups == 1:
        system.contract(channels, inside)
        produced = made
    elif not inside and not transposed and atoms_of(channels) == atoms_of(made):  # one filter for each channel
        produced = system.multiply(channels, made)
    else:
        raise NotCovered("groups of several channels")
    spatial = x[len(x) - num_spatial :]
    system.forbid(*weight[2:], *spatial)
    result = (*batch, produced, *args.expected[len(batch) + 1 :])
    return _add_bias(system, result, len(batch), args.get("bias"))


def _embedding(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    rows, *units = args["weight"]
    system.forbid(rows, *args["indices"])
    return (*args["indices"], *units)


def _attention(system: SlotSystem, args: SlotArguments) -> Any:
    """Queries and keys meet in scores, from which probabilities are made, with which the values are averaged."""
    query, key, value = (args[name] for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value):
        raise NotCovered("operands of different ranks")
    system.contract(query[-1], key[-1])
    scores = [system.multiply(first, second) for first, second in zip(query[:-2], key[:-2], strict=True)]
    system.forbid(*scores, query[-2], key[-2], value[-2])
    if isinstance(args.get("attn_mask"), tuple):
        system.forbid(*args["attn_mask"])
    heads = (system.multiply(system.constant(atoms_of(s)), v) for s, v in zip(scores, value[:-2], strict=True))
    result = (*heads, query[-2], value[-1])
    return [result, *args.expected[1:]] if isinstance(args.expected, list) else result


def _recurrent(system: SlotSystem, args: SlotArguments) -> Any:
    """A recurrent layer: its input meets the first weights of each direction, and nothing else is known of it."""
    if "input" not in args or args.get("train"):
        raise NotCovered("packed sequences, or dropout between layers")
    params = args["params"]
    directions = 2 if args["bidirectional"] else 1
    each = len(params) // (args["num_layers"] * directions)
    *others, units = args.input
    first = [params[each * number] for number in range(directions)]
    for weight in first:
        system.contract(units, weight[1])
    rest = [axis for tensor in params if not any(tensor is weight for weight in first) for axis in tensor]
    states = args["hx"] if isinstance(args["hx"], list) else [args["hx"]]
    system.forbid(*others, *(weight[0] for weight in first), *rest, *(axis for state in states for axis in state))
    return args.expected


def reduce(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A sum or a mean over some axes."""
    dims = args.axes(args.get("dim"))
    for number in dims:
        system.sum_over(args.input[number])
    kept = [slots for number, slots in enumerate(args.input) if number not in dims]
    if not args.get("keepdim"):
        return (*kept,)
    return tuple(() if number in dims else slots for number, slots in enumerate(args.input))


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
    tensors = [tensor for tensor in args["tensors"] if len(tensor) == len(args.expected)]  # an empty vector fits anything
    dim = args["dim"] % len(args.expected)
    columns = zip(*tensors, strict=True)
    return tuple(
        tuple(itertools.chain(*column)) if number == dim else system.equate(*column) for number, column in enumerate(columns)
    )


def _stack(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    joined = [system.equate(*column) for column in zip(*args["tensors"], strict=True)]
    joined.insert(args["dim"] % len(args.expected), ())
    return tuple(joined)


def _exchange(name: str) -> Rule:
    """Axes in another order, as the rule for axes has it: it does not look into them."""
    rule = REARRANGEMENT[name]
    return lambda system, args: rule(system.trace, args)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("neg", "negative", "positive", "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh",
         "lift_fresh_copy", "type_as"),
        keep,
    ),
    **dict.fromkeys(("roll", "flip"), keep),  # entries move along axes that are pinned
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
        _read_shape,
    ),
    **{f"{kind}_pool{n}d": keep for n in (1, 2, 3) for kind in ("avg", "adaptive_avg", "_adaptive_avg")},
    **{f"upsample_{mode}{n}d": keep for n in (1, 2, 3)
       for mode in ("nearest", "linear", "bilinear", "trilinear", "bicubic")},
    **dict.fromkeys(("pad", "constant_pad_nd"), _keep_linear),
    **dict.fromkeys(("expand", "expand_as", "repeat"), _expand),
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), add_operands),
    **dict.fromkeys(("mul", "multiply"), _multiply_operands),
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **{f"{name}{n}d": _convolution for name in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "convolution": _convolution,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("sum", "mean"), reduce),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"),
        _reshape,
    ),
    **{
        name: _exchange(name)
        for name in ("permute", "transpose", "swapaxes", "swapdims", "mT", "t", "numpy_T", "movedim", "moveaxis")
    },
    **dict.fromkeys(("select", "slice", "narrow"), _select_part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    "stack": _stack,
    "unbind": _unbind,
}  # fmt: skip

TAKES_SEGMENTS = frozenset(
    ("clone", "contiguous", "to", "_to_copy", "detach", "alias", "view", "reshape", "_unsafe_view", "flatten", "unflatten",
     "view_as", "reshape_as", "squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "swapdims", "mT", "t", "numpy_T",
     "movedim", "moveaxis", "select", "unbind")
)  # fmt: skip
"""Operations whose rules know of axes that are others beside each segment of another axis."""

COMPARISONS = frozenset(
    ("gt", "greater", "ge", "greater_equal", "lt", "less", "le", "less_equal", "eq", "ne", "not_equal")
)  # fmt: skip
"""Operations that make truth values, of which rules may know that nothing changes those. Others that make whole numbers or
truth values forbid everything, whatever rule there is."""
