"""Operations that multiply, add and rearrange: what they require of slots, by ATen name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from onebasin.tracing.rules.contraction import Letters, einsum_letters, matmul_letters
from onebasin.tracing.rules.experts import RULES as EXPERTS
from onebasin.tracing.slots import indexing, rearrangement
from onebasin.tracing.slots.arguments import Rule, SlotArguments, align_operands, equate_operands, is_zero, weigh
from onebasin.tracing.slots.system import Slots, SlotSystem, TensorSlots, atoms_of
from onebasin.tracing.trace import NotCovered


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


def add_operands(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A sum; a number that is added changes what is added to."""
    return equate_operands(system, args, ("input", "other"))


def _interpolate(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """X + w (y - x)."""
    found = equate_operands(system, args, ("input", "end"))
    return weigh(system, args["weight"], found) if isinstance(args["weight"], tuple) else found


def _multiply_operands(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    result = []
    for first, *others in align_operands(args):
        for other in others:
            first = system.multiply(first, other)
        result.append(first)
    return tuple(result)


def _divide_operands(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    if args.get("rounding_mode"):
        raise NotCovered("a quotient is rounded")
    result = []
    for first, *others in align_operands(args):
        for other in others:
            first = system.divide(first, other)
        result.append(first)
    return tuple(result)


def _add_product(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A tensor plus the product or the quotient of two others."""
    combine = system.divide if args.operation.startswith("addcdiv") else system.multiply
    num_added = 0 if is_zero(args, "input") else 1
    return tuple(system.equate(*([added] * num_added), combine(*pair)) for added, *pair in align_operands(args))


def _gate(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """First * sigmoid(second), for the two halves of an axis."""
    axis = args.input[args.dim]
    first, second = axis[: len(axis) // 2], axis[len(axis) // 2 :]
    if atoms_of(first) != atoms_of(second):
        raise NotCovered("halves of different structures")
    system.forbid(second, *(other for number, other in enumerate(args.input) if number != args.dim))
    gated = system.multiply(first, system.constant(atoms_of(second)))
    return (*args.input[: args.dim], gated, *args.input[args.dim + 1 :])


def _accumulate(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Sums of all entries up to each."""
    system.forbid(args.input[args.dim])
    return args.input


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


def _bilinear(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    batch = [("batch", i) for i in range(len(args.expected) - 1)]
    operands = [
        (args["input1"], [*batch, "left"]), (args["input2"], [*batch, "right"]), (args["weight"], ["out", "left", "right"])
    ]  # fmt: skip
    return _add_bias(system, _contract(system, operands, [*batch, "out"]), -1, args.get("bias"))


def _tensordot(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A product summed over some axes of both tensors."""
    x, y = args.input, args["other"]
    left, right = [("left", i) for i in range(len(x))], [("right", i) for i in range(len(y))]
    for number, (i, j) in enumerate(zip(args["dims_self"], args["dims_other"], strict=True)):
        left[i], right[j] = ("sum", number), ("sum", number)
    return _contract(system, [(x, left), (y, right)], [letter for letter in [*left, *right] if letter[0] != "sum"])


def _inner(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """A product summed over the last axes."""
    x, y = args.input, args["other"]
    if not x or not y:
        return x or y
    left, right = [("left", i) for i in range(len(x) - 1)], [("right", i) for i in range(len(y) - 1)]
    return _contract(system, [(x, [*left, "inner"]), (y, [*right, "inner"])], [*left, *right])


def _outer(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """The outer product of two vectors."""
    (rows,), (columns,) = (value for value in args.values() if isinstance(value, tuple))
    return (rows, columns)


def _grouped_mm(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """Rows that are sorted by expert, each multiplied by the matrix of its own."""
    operands: list[TensorSlots] = [value for value in args.values() if isinstance(value, tuple)]
    if list(map(len, operands)) != [2, 3, 1]:
        raise NotCovered("only rows of one matrix, grouped by offsets, are covered")
    rows, weights, offsets = operands
    system.forbid(rows[0], weights[0], *offsets)
    system.contract(rows[1], weights[1])
    return (args.expected[0], weights[2])


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


def _sample(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """An image read between its positions, at coordinates."""
    batch, channels, *positions = args.input
    system.forbid(batch, *positions, *args["grid"])
    return (args.expected[0], channels, *args.expected[2:])


def _unfold(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    """The windows of an image: channels stand beside the positions in a window."""
    *batch, channels, rows, columns = args.input
    system.forbid(rows, columns)
    return (*batch, channels, args.expected[-1])


def _embedding(system: SlotSystem, args: SlotArguments) -> TensorSlots:
    rows, *units = args["weight"]
    system.forbid(rows, *args["indices"])
    return (*args["indices"], *units)


def _embedding_bag(system: SlotSystem, args: SlotArguments) -> list[TensorSlots]:
    """Sums or means of bags of rows."""
    if args["mode"] == 2:
        raise NotCovered("the largest of each bag")
    rows, units = args["weight"]
    system.forbid(rows, *args["indices"], *args["offsets"], *(args["per_sample_weights"] or ()))
    return [(args.expected[0][0], units), *args.expected[1:]]


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


RULES: dict[str, Rule] = {
    **rearrangement.RULES,
    **indexing.RULES,
    **dict.fromkeys(
        ("neg", "negative", "positive", "clone", "contiguous", "to", "_to_copy", "detach", "alias", "lift_fresh",
         "lift_fresh_copy", "type_as"),
        keep,
    ),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero", "fill"),
        _read_shape,
    ),
    **{f"{kind}_pool{n}d": keep for n in (1, 2, 3) for kind in ("avg", "adaptive_avg", "_adaptive_avg")},
    **{f"upsample_{mode}{n}d": keep for n in (1, 2, 3)
       for mode in ("nearest", "linear", "bilinear", "trilinear", "bicubic")},
    **dict.fromkeys(("pad", "constant_pad_nd"), _keep_linear),
    **{f"{mode}_pad{n}d": keep for mode in ("reflection", "replication") for n in (1, 2, 3)},
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _sample),
    "im2col": _unfold,
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), add_operands),
    **dict.fromkeys(("mul", "multiply"), _multiply_operands),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide_operands),
    **dict.fromkeys(("addcmul", "addcdiv"), _add_product),
    "lerp": _interpolate,
    "glu": _gate,
    "cumsum": _accumulate,
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    "bilinear": _bilinear,
    "tensordot": _tensordot,
    "inner": _inner,
    "outer": _outer,
    **dict.fromkeys(EXPERTS, _grouped_mm),
    **{f"{name}{n}d": _convolution for name in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "convolution": _convolution,
    "embedding": _embedding,
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _embedding_bag),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("sum", "mean"), reduce),
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
