"""What each operation requires of the degrees of its operands, by ATen name.

An operation that is not in the table requires degree zero of everything it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch.fx import Node

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.degrees.equations import Degrees, Form, Slots, System, atoms_of, times
from onebasin.tracing.rules.contraction import Letters, einsum_letters, matmul_letters
from onebasin.tracing.rules.rearrangement import RULES as REARRANGEMENT
from onebasin.tracing.trace import Arguments, NotCovered


class DegreeArguments(Arguments):
    """The arguments of an operation by the names of its schema, tensors as `Degrees`.

    Attributes:
        expected: the result with its atoms, all degrees zero.
        program: of the operation.
    """

    def __init__(self, values: Mapping[str, Any], node: Node, expected: Any, program: Program):
        super().__init__(values, node)
        self.expected, self.program = expected, program

    @property
    def input(self) -> Any:
        """The degrees of the first operand."""
        return self["input"]

    def key(self, argument: str) -> str | None:
        """The state key of an argument that is a parameter or buffer by itself."""
        node = bind_arguments(self.node).get(argument)
        return self.program.keys.get(node.name) if isinstance(node, Node) else None


Rule = Callable[[System, DegreeArguments], Any]
"""Adds what an operation requires and returns the degrees of the result. Where the result has other atoms than expected, or
the rule raises `NotCovered`, all that the operation reads has degree zero."""


def _keep(system: System, args: DegreeArguments) -> Any:
    """Commutes with positive factors, and every entry keeps its place."""
    return [args.input, *args.expected[1:]] if isinstance(args.expected, list) else args.input


def _keep_linear(system: System, args: DegreeArguments) -> Degrees:
    """Padding, by zeros or by entries."""
    if args.get("value") not in (None, 0, 0.0):
        raise NotCovered("padded with another number than zero")
    return args.input


def _expand(system: System, args: DegreeArguments) -> Degrees:
    """New axes stand in front."""
    return ((),) * (len(args.expected) - len(args.input)) + args.input


def _prelu(system: System, args: DegreeArguments) -> Degrees:
    system.require_zero(*args["weight"])
    return args.input


def _power(exponent: Any) -> Rule:
    def rule(system: System, args: DegreeArguments) -> Degrees:
        power = exponent if exponent is not None else args["exponent"]
        if isinstance(power, bool) or not isinstance(power, int | float) or power <= 0 or int(power) != power:
            raise NotCovered("no whole power")
        return tuple(tuple((atom, times(form, int(power))) for atom, form in slots) for slots in args.input)

    return rule


def _aligned(args: DegreeArguments) -> list[list[Slots]]:
    """For each axis of an elementwise result the slots of the operands that have it."""
    num_axes = len(args.expected)
    operands = [value for value in args.values() if isinstance(value, tuple)]
    padded = [((),) * (num_axes - len(value)) + value for value in operands]
    return [list(column) for column in zip(*padded, strict=True)]


def _sum_of_operands(system: System, args: DegreeArguments) -> Degrees:
    """Equal degrees; a number that is added has none."""
    added = args.get("other")
    if isinstance(added, int | float) and added != 0:
        raise NotCovered("a number is added")
    return tuple(system.require_equal(*column) for column in _aligned(args))


def _product(sign: int) -> Rule:
    def rule(system: System, args: DegreeArguments) -> Degrees:
        if args.get("rounding_mode"):
            raise NotCovered("a quotient is rounded")
        result = []
        for first, *others in _aligned(args):
            for other in others:
                first = system.add(first, tuple((atom, times(form, sign)) for atom, form in other))
            result.append(first)
        return tuple(result)

    return rule


def _contract(system: System, operands: Sequence[tuple[Degrees, Letters]], result: Letters) -> Degrees:
    found: dict[Hashable, Slots] = {}
    for degrees, letters in operands:
        for slots, letter in zip(degrees, letters, strict=True):
            found[letter] = system.add(found.get(letter, ()), slots)
    system.require_zero(*(slots for letter, slots in found.items() if letter not in result))
    return tuple(found[letter] for letter in result)


def _add_bias(system: System, product: Degrees, axis: int, bias: Degrees | None) -> Degrees:
    """A bias along one axis; along all others it is constant."""
    if bias is None:
        return product
    system.require_zero(*(slots for number, slots in enumerate(product) if number != axis % len(product)))
    total = list(product)
    total[axis] = system.require_equal(product[axis], bias[0])
    return tuple(total)


def _linear(system: System, args: DegreeArguments) -> Degrees:
    batch = [("batch", i) for i in range(len(args.input) - 1)]
    if len(args["weight"]) != 2:
        raise NotCovered("a weight that is a vector")
    product = _contract(system, [(args.input, [*batch, "in"]), (args["weight"], ["out", "in"])], [*batch, "out"])
    return _add_bias(system, product, -1, args.get("bias"))


def _matmul(system: System, args: DegreeArguments) -> Degrees:
    x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    return _contract(system, [(x, left), (y, right)], result)


def _addmm(system: System, args: DegreeArguments) -> Degrees:
    added, x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    product = _contract(system, [(x, left), (y, right)], result)
    padded = ((),) * (len(product) - len(added)) + added
    return tuple(system.require_equal(*pair) for pair in zip(product, padded, strict=True))


def _einsum(system: System, args: DegreeArguments) -> Degrees:
    letters, result = einsum_letters(args["equation"], [len(value) for value in args["tensors"]])
    return _contract(system, list(zip(args["tensors"], letters, strict=True)), result)


def _convolution(system: System, args: DegreeArguments) -> Degrees:
    x, weight, groups = args.input, args["weight"], args["groups"]
    num_spatial = len(weight) - 2
    *batch, channels = x[: len(x) - num_spatial]
    transposed = args.get("transposed", "transpose" in args.operation)
    inside, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups == 1:
        system.add(channels, inside, is_zero=True)
        produced = made
    elif not inside and not transposed and atoms_of(channels) == atoms_of(made):  # one filter for each channel
        produced = system.add(channels, made)
    else:
        raise NotCovered("groups of several channels")
    spatial = x[len(x) - num_spatial :]
    system.require_zero(*weight[2:], *spatial)
    result = (*batch, produced, *args.expected[len(batch) + 1 :])
    return _add_bias(system, result, len(batch), args.get("bias"))


def _embedding(system: System, args: DegreeArguments) -> Degrees:
    rows, *units = args["weight"]
    system.require_zero(rows, *args["indices"])
    return (*args["indices"], *units)


def _attention(system: System, args: DegreeArguments) -> Any:
    """Scores of queries and keys have degree zero; the result has the degrees of the values."""
    query, key, value = (args[name] for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value):
        raise NotCovered("operands of different ranks")
    for first, second in zip((*query[:-2], query[-1]), (*key[:-2], key[-1]), strict=True):
        system.add(first, second, is_zero=True)
    system.require_zero(query[-2], key[-2], value[-2])
    if isinstance(args.get("attn_mask"), tuple):
        system.require_zero(*args["attn_mask"])
    result = (*value[:-2], query[-2], value[-1])
    return [result, *args.expected[1:]] if isinstance(args.expected, list) else result


def _batch_norm(system: System, args: DegreeArguments) -> Degrees:
    """With stored statistics, x - mean needs equal degrees, and the root of var + eps takes them out again."""
    batch, channels, *spatial = args.input
    mean, variance, key = args.get("running_mean"), args.get("running_var"), args.key("running_var")
    system.require_zero(batch, *spatial)
    if args.get("training", True) or mean is None or variance is None or key is None:
        system.require_zero(channels, *(mean or ()), *(variance or ()))
    elif system.offsets.setdefault(key, args["eps"]) != args["eps"]:
        raise NotCovered("one variance is used with several eps")
    else:
        system.require_equal(channels, mean[0])
        system.require_equal(tuple((atom, times(form, 2)) for atom, form in channels), variance[0])
    return _affine(system, args, 1)


def _trailing_norm(system: System, args: DegreeArguments) -> Degrees:
    system.require_zero(*args.input)
    if len(args["normalized_shape"]) != 1:
        raise NotCovered("several axes are normalised together")
    return _affine(system, args, -1)


def _group_norm(system: System, args: DegreeArguments) -> Degrees:
    system.require_zero(*args.input)
    return _affine(system, args, 1)


def _affine(system: System, args: DegreeArguments, axis: int) -> Degrees:
    """What is normalised has degree zero, until a weight and a bias give it theirs."""
    weight, bias = args.get("weight"), args.get("bias")
    result = list(args.expected)
    if weight is not None:
        result[axis] = weight[0] if bias is None else system.require_equal(weight[0], bias[0])
    elif bias is not None:
        system.require_zero(bias[0])
    return tuple(result)


def _reduce(system: System, args: DegreeArguments) -> Degrees:
    dims = args.axes(args.get("dim"))
    system.require_zero(*(slots for number, slots in enumerate(args.input) if number in dims))
    kept = [slots for number, slots in enumerate(args.input) if number not in dims]
    return (
        tuple(() if number in dims else slots for number, slots in enumerate(args.input))
        if args.get("keepdim")
        else (*kept,)
    )


def _reshape(system: System, args: DegreeArguments) -> Degrees:
    """Atoms keep their order in memory."""
    flat = list(itertools.chain(*args.input))
    return _deal(flat, args.expected)


def _deal(flat: Sequence[tuple[Atom, Form]], expected: Degrees) -> Degrees:
    if [atom for atom, _ in flat] != [atom for slots in expected for atom, _ in slots]:
        raise NotCovered("reshaped across its structure")
    rest = iter(flat)
    return tuple(tuple(itertools.islice(rest, len(slots))) for slots in expected)


def _select_part(system: System, args: DegreeArguments) -> Degrees:
    """A slice: along the axis that is cut the part that has the atoms of the result."""
    if len(args.expected) != len(args.input):
        kept = [slots for number, slots in enumerate(args.input) if number != args.dim]
        system.require_zero(args.input[args.dim])
        return tuple(kept)
    return tuple(_part(slots, atoms_of(wanted)) for slots, wanted in zip(args.input, args.expected, strict=True))


def _part(slots: Slots, wanted: tuple[Atom, ...]) -> Slots:
    atoms = atoms_of(slots)
    found = [n for n in range(len(atoms) - len(wanted) + 1) if atoms[n : n + len(wanted)] == wanted]
    if len(found) != 1 and wanted:
        raise NotCovered("a part that cannot be told from others")
    return slots[found[0] : found[0] + len(wanted)] if wanted else ()


def _split(system: System, args: DegreeArguments) -> list[Degrees]:
    dim, result, taken = args.dim, [], 0
    for part in args.expected:
        count = len(part[dim])
        result.append((*args.input[:dim], args.input[dim][taken : taken + count], *args.input[dim + 1 :]))
        taken += count
    return result


def _concatenate(system: System, args: DegreeArguments) -> Degrees:
    tensors = args["tensors"]
    dim = args["dim"] % len(args.expected)
    columns = zip(*tensors, strict=True)
    return tuple(
        tuple(itertools.chain(*column)) if number == dim else system.require_equal(*column)
        for number, column in enumerate(columns)
    )


def _stack(system: System, args: DegreeArguments) -> Degrees:
    joined = [system.require_equal(*column) for column in zip(*args["tensors"], strict=True)]
    joined.insert(args["dim"] % len(args.expected), ())
    return tuple(joined)


def _exchange(name: str) -> Rule:
    """Axes in another order, as the rule for axes has it: it does not look into them."""
    rule = REARRANGEMENT[name]
    return lambda system, args: rule(system.trace, args)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("relu", "leaky_relu", "abs", "absolute", "neg", "negative", "positive", "clone", "contiguous", "to", "_to_copy",
         "detach", "alias", "lift_fresh", "lift_fresh_copy", "type_as", "dropout", "feature_dropout"),
        _keep,
    ),
    **{f"{kind}_pool{n}d{suffix}": _keep for n in (1, 2, 3) for suffix in ("", "_with_indices")
       for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "_adaptive_avg")},
    **{f"upsample_{mode}{n}d": _keep for n in (1, 2, 3)
       for mode in ("nearest", "linear", "bilinear", "trilinear", "bicubic")},
    **dict.fromkeys(("pad", "constant_pad_nd"), _keep_linear),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "prelu": _prelu,
    "square": _power(2),
    "pow": _power(None),
    **dict.fromkeys(("add", "sub", "subtract", "rsub", "maximum", "minimum"), _sum_of_operands),
    **dict.fromkeys(("mul", "multiply"), _product(1)),
    **dict.fromkeys(("div", "divide", "true_divide"), _product(-1)),
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    **{f"{name}{n}d": _convolution for name in ("conv", "conv_transpose") for n in (1, 2, 3)},
    "convolution": _convolution,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), _trailing_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), _group_norm),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), _reduce),
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
}  # fmt: skip
