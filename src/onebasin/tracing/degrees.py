"""Positive scales that leave a function alone, from the degrees of the values of its programs.

Multiply what belongs to unit i of a parameter by s_i to some power: its *degree* along that axis. The degrees of parameters
are unknown numbers. Those of every other value are sums of them: products add the degrees of their operands, ReLU and
pooling keep them. What an operation cannot keep is a linear equation: operands of a sum have equal degrees, an axis that is
summed over has degree zero, and so has everything that goes into an operation without a rule here. The solutions are the
scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from onebasin.programs.graph import Program
from onebasin.programs.shapes import bind_arguments
from onebasin.symmetries import Power, Scale
from onebasin.torch_internals import find_schema
from onebasin.tracing.axes.terms import Atom, Axes, Piecewise, leaves, resolve
from onebasin.tracing.rules.contraction import Letters, einsum_letters, matmul_letters
from onebasin.tracing.trace import Arguments, NotCovered, Trace, iterate_tensors, operation_name

Unknown = tuple[str, int, int]
"""The degree of a parameter: its key, an axis, and the number of the free atom in that axis."""
Form = Mapping[Unknown, Fraction]
"""A sum of unknowns with factors."""
Slots = tuple[tuple[Atom, Form], ...]
"""The degree along each free atom of an axis, in order."""
Degrees = tuple[Slots, ...]
"""One for each axis of a tensor."""


def find_scales(trace: Trace, names: Mapping[Atom, str], keys: Iterable[str]) -> dict[str, Scale]:
    """The positive scales of the named groups, by name.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
        keys: of the state, in order.
    """
    system = _System(trace, names)
    for program, values in trace.walks:
        _Reading(system, program, values).run()
    return system.solve(list(keys))


# ------------------------------------------------------------------------------------------------------------ equations


class _System:
    """The unknown degrees, and what the operations require of them."""

    def __init__(self, trace: Trace, names: Mapping[Atom, str]):
        self.trace = trace
        self.names = {atom: name for atom, name in names.items() if not atom.pin}
        self.equations: dict[Atom, list[Form]] = {}
        self.offsets: dict[str, float] = {}

    def template(self, axes: Axes) -> tuple[tuple[Atom, ...], ...]:
        """The free atoms of each axis."""
        return tuple(tuple(atom for atom in leaves(axis) if atom in self.names) for axis in axes)

    def read(self, key: str) -> Degrees:
        """The unknown degrees of a parameter; zero along an axis that differs beside each segment of another."""
        axes = self.trace.state[key]
        return tuple(
            _zeros(atoms)
            if isinstance(resolve(axes[axis]), Piecewise)
            else tuple((atom, {(key, axis, number): Fraction(1)}) for number, atom in enumerate(atoms))
            for axis, atoms in enumerate(self.template(axes))
        )

    def require_zero(self, *axes: Slots) -> None:
        """Require degree zero along these axes."""
        for atom, form in itertools.chain(*axes):
            if form:
                self.equations.setdefault(atom, []).append(form)

    def require_equal(self, first: Slots, *others: Slots) -> Slots:
        """Require equal degrees. Along an axis that only one of them has, the others are constant: there they are zero."""
        for other in others:
            self.add(first, tuple((atom, _times(form, -1)) for atom, form in other), is_zero=True)
        return first if first else next((other for other in others if other), ())

    def add(self, first: Slots, second: Slots, is_zero: bool = False) -> Slots:
        """The sum of degrees, required to be zero if told so. Axes that do not match have degree zero both."""
        if not first or not second:
            total = first or second
        elif _atoms(first) == _atoms(second):
            total = tuple((atom, _plus(a, b)) for (atom, a), (_, b) in zip(first, second, strict=True))
        else:
            self.require_zero(first, second)
            return _zeros(_atoms(first))
        if is_zero:
            self.require_zero(total)
        return total

    def solve(self, keys: Sequence[str]) -> dict[str, Scale]:
        """A scale for each solution of a basis in which few tensors take each."""
        order = {key: number for number, key in enumerate(keys)}
        unknowns: dict[Atom, list[Unknown]] = {}
        for key in self.trace.state:
            if key in self.trace.reached:
                for slots in self.read(key):
                    for atom, form in slots:
                        unknowns.setdefault(atom, []).extend(form)
        scales: dict[str, Scale] = {}
        for atom in self.names:
            # What makes units comes first: the first of the unknowns of a solution is chosen freely, and names it.
            found = sorted(unknowns.get(atom, ()), key=lambda u: (u[1] > 0, order[u[0]], u[1:]))
            for solution in _null_space(found, self.equations.get(atom, ())):
                scale = self._make_scale(atom, solution, taken=scales)
                scales[scale.name] = scale
        return scales

    def _make_scale(self, atom: Atom, solution: Mapping[Unknown, Fraction], taken: Iterable[str]) -> Scale:
        powers: dict[str, list[Power]] = {}
        aliases: dict[str, list[str]] = {}
        for key, first in self.trace.aliases.items():
            aliases.setdefault(first, []).append(key)
        for (key, axis, number), degree in solution.items():
            atoms = self.template(self.trace.state[key])[axis]
            power = Power(axis, atoms[:number].count(atom), int(degree) if degree.denominator == 1 else float(degree))
            for each in aliases.get(key, [key]):
                powers.setdefault(each, []).append(power)
        base = name = next(iter(solution))[0]
        for number in itertools.count(2):
            if name not in taken:
                break
            name = f"{base}:{number}"
        offsets = {key: offset for key, offset in self.offsets.items() if key in powers}
        return Scale(name, self.names[atom], {key: tuple(entries) for key, entries in powers.items()}, offsets)


def _null_space(unknowns: Sequence[Unknown], equations: Iterable[Form]) -> list[dict[Unknown, Fraction]]:
    """A basis of the solutions; each begins with the unknown that it is one at, and those of all others vanish there."""
    order = {unknown: number for number, unknown in enumerate(unknowns)}
    solved: dict[Unknown, dict[Unknown, Fraction]] = {}
    for equation in equations:
        form = _substitute(equation, solved)
        if not form:
            continue
        pivot = max(form, key=order.__getitem__)
        rest = {u: -c / form[pivot] for u, c in form.items() if u != pivot}
        for other, value in solved.items():
            if pivot in value:
                solved[other] = _substitute(value, {pivot: rest})
        solved[pivot] = rest
    found = []
    for free in unknowns:
        if free not in solved:
            found.append({free: Fraction(1), **{u: form[free] for u, form in solved.items() if form.get(free)}})
    return [_make_integral(solution) for solution in found]


def _substitute(form: Form, solved: Mapping[Unknown, Form]) -> dict[Unknown, Fraction]:
    result: dict[Unknown, Fraction] = {}
    for unknown, factor in form.items():
        for other, inner in solved[unknown].items() if unknown in solved else ((unknown, Fraction(1)),):
            result[other] = result.get(other, Fraction(0)) + factor * inner
    return {unknown: factor for unknown, factor in result.items() if factor}


def _make_integral(solution: dict[Unknown, Fraction]) -> dict[Unknown, Fraction]:
    common = math.lcm(*(factor.denominator for factor in solution.values()))
    return {unknown: factor * common for unknown, factor in solution.items()}


def _plus(first: Form, second: Form) -> Form:
    total = dict(first)
    for unknown, factor in second.items():
        total[unknown] = total.get(unknown, Fraction(0)) + factor
    return {unknown: factor for unknown, factor in total.items() if factor}


def _times(form: Form, factor: int | Fraction) -> Form:
    return {unknown: factor * value for unknown, value in form.items()}


def _atoms(slots: Slots) -> tuple[Atom, ...]:
    return tuple(atom for atom, _ in slots)


def _zeros(atoms: Iterable[Atom]) -> Slots:
    return tuple((atom, {}) for atom in atoms)


# -------------------------------------------------------------------------------------------------------------- reading


class _Reading:
    """Goes through a program that was walked, and adds what its operations require to the system."""

    def __init__(self, system: _System, program: Program, axes: Mapping[Node, Any]):
        self.system, self.program, self.axes = system, program, axes
        self.values: dict[Node, Any] = {}

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._read_placeholder(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._require_zero(node)
            else:
                self.values[node] = None

    def _read_placeholder(self, node: Node) -> Any:
        kind, name = self.program.inputs[node.name]
        if not isinstance(node.meta.get("val"), Tensor):
            return self.axes[node]
        key = self.system.trace.aliases.get(name, name)
        if kind in (InputKind.PARAMETER, InputKind.BUFFER) and key in self.system.trace.state:
            return self.system.read(key)
        return self._make_zeros(self.axes[node])

    def _make_zeros(self, axes: Any) -> Any:
        if isinstance(axes, list):
            return [self._make_zeros(entry) for entry in axes]
        return tuple(map(_zeros, self.system.template(axes))) if isinstance(axes, tuple) else axes

    def _call(self, node: Node) -> Any:
        name = operation_name(node)
        if name == "getitem":
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if not getattr(find_schema(node.target), "returns", True):
            return None
        name = name if name in RULES else name.removesuffix("_")
        expected = self._make_zeros(self.axes[node])
        if name in RULES:
            try:
                found = RULES[name](self.system, self._bind(node, expected))
            except NotCovered:
                found = None
            if found is not None and _same_atoms(found, expected):
                return found
        self._require_zero(node)
        return expected

    def _bind(self, node: Node, expected: Any) -> _Arguments:
        bound = map_arg(bind_arguments(node), self.values.__getitem__)
        return _Arguments({"input" if n == "self" else n: v for n, v in bound.items()}, node, expected, self.program)

    def _require_zero(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            for degrees in iterate_tensors(self.values[operand]):
                self.system.require_zero(*degrees)


class _Arguments(Arguments):
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


def _same_atoms(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_same_atoms, found, expected))
    if expected is None or found is None:
        return expected is found
    return list(map(_atoms, found)) == list(map(_atoms, expected))


# ---------------------------------------------------------------------------------------------------------------- rules

Rule = Callable[[_System, _Arguments], Any]
"""Adds what an operation requires and returns the degrees of the result. Where the result has other atoms than expected, or
the rule raises `NotCovered`, all that the operation reads has degree zero."""


def _keep(system: _System, args: _Arguments) -> Any:
    """Commutes with positive factors, and every entry keeps its place."""
    return [args.input, *args.expected[1:]] if isinstance(args.expected, list) else args.input


def _keep_linear(system: _System, args: _Arguments) -> Degrees:
    """Padding, by zeros or by entries."""
    if args.get("value") not in (None, 0, 0.0):
        raise NotCovered("padded with another number than zero")
    return args.input


def _expand(system: _System, args: _Arguments) -> Degrees:
    """New axes stand in front."""
    return ((),) * (len(args.expected) - len(args.input)) + args.input


def _prelu(system: _System, args: _Arguments) -> Degrees:
    system.require_zero(*args["weight"])
    return args.input


def _power(exponent: Any) -> Rule:
    def rule(system: _System, args: _Arguments) -> Degrees:
        power = exponent if exponent is not None else args["exponent"]
        if isinstance(power, bool) or not isinstance(power, int | float) or power <= 0 or int(power) != power:
            raise NotCovered("no whole power")
        return tuple(tuple((atom, _times(form, int(power))) for atom, form in slots) for slots in args.input)

    return rule


def _aligned(args: _Arguments) -> list[list[Slots]]:
    """For each axis of an elementwise result the slots of the operands that have it."""
    num_axes = len(args.expected)
    operands = [value for value in args.values() if isinstance(value, tuple)]
    padded = [((),) * (num_axes - len(value)) + value for value in operands]
    return [list(column) for column in zip(*padded, strict=True)]


def _sum_of_operands(system: _System, args: _Arguments) -> Degrees:
    """Equal degrees; a number that is added has none."""
    added = args.get("other")
    if isinstance(added, int | float) and added != 0:
        raise NotCovered("a number is added")
    return tuple(system.require_equal(*column) for column in _aligned(args))


def _product(sign: int) -> Rule:
    def rule(system: _System, args: _Arguments) -> Degrees:
        if args.get("rounding_mode"):
            raise NotCovered("a quotient is rounded")
        result = []
        for first, *others in _aligned(args):
            for other in others:
                first = system.add(first, tuple((atom, _times(form, sign)) for atom, form in other))
            result.append(first)
        return tuple(result)

    return rule


def _contract(system: _System, operands: Sequence[tuple[Degrees, Letters]], result: Letters) -> Degrees:
    found: dict[Hashable, Slots] = {}
    for degrees, letters in operands:
        for slots, letter in zip(degrees, letters, strict=True):
            found[letter] = system.add(found.get(letter, ()), slots)
    system.require_zero(*(slots for letter, slots in found.items() if letter not in result))
    return tuple(found[letter] for letter in result)


def _add_bias(system: _System, product: Degrees, axis: int, bias: Degrees | None) -> Degrees:
    """A bias along one axis; along all others it is constant."""
    if bias is None:
        return product
    system.require_zero(*(slots for number, slots in enumerate(product) if number != axis % len(product)))
    total = list(product)
    total[axis] = system.require_equal(product[axis], bias[0])
    return tuple(total)


def _linear(system: _System, args: _Arguments) -> Degrees:
    batch = [("batch", i) for i in range(len(args.input) - 1)]
    if len(args["weight"]) != 2:
        raise NotCovered("a weight that is a vector")
    product = _contract(system, [(args.input, [*batch, "in"]), (args["weight"], ["out", "in"])], [*batch, "out"])
    return _add_bias(system, product, -1, args.get("bias"))


def _matmul(system: _System, args: _Arguments) -> Degrees:
    x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    return _contract(system, [(x, left), (y, right)], result)


def _addmm(system: _System, args: _Arguments) -> Degrees:
    added, x, y = (value for value in args.values() if isinstance(value, tuple))
    left, right, result = matmul_letters(len(x), len(y))
    product = _contract(system, [(x, left), (y, right)], result)
    padded = ((),) * (len(product) - len(added)) + added
    return tuple(system.require_equal(*pair) for pair in zip(product, padded, strict=True))


def _einsum(system: _System, args: _Arguments) -> Degrees:
    letters, result = einsum_letters(args["equation"], [len(value) for value in args["tensors"]])
    return _contract(system, list(zip(args["tensors"], letters, strict=True)), result)


def _convolution(system: _System, args: _Arguments) -> Degrees:
    x, weight, groups = args.input, args["weight"], args["groups"]
    num_spatial = len(weight) - 2
    *batch, channels = x[: len(x) - num_spatial]
    transposed = args.get("transposed", "transpose" in args.operation)
    inside, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups == 1:
        system.add(channels, inside, is_zero=True)
        produced = made
    elif not inside and not transposed and _atoms(channels) == _atoms(made):  # one filter for each channel
        produced = system.add(channels, made)
    else:
        raise NotCovered("groups of several channels")
    spatial = x[len(x) - num_spatial :]
    system.require_zero(*weight[2:], *spatial)
    result = (*batch, produced, *args.expected[len(batch) + 1 :])
    return _add_bias(system, result, len(batch), args.get("bias"))


def _embedding(system: _System, args: _Arguments) -> Degrees:
    rows, *units = args["weight"]
    system.require_zero(rows, *args["indices"])
    return (*args["indices"], *units)


def _attention(system: _System, args: _Arguments) -> Any:
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


def _batch_norm(system: _System, args: _Arguments) -> Degrees:
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
        system.require_equal(tuple((atom, _times(form, 2)) for atom, form in channels), variance[0])
    return _affine(system, args, 1)


def _trailing_norm(system: _System, args: _Arguments) -> Degrees:
    system.require_zero(*args.input)
    if len(args["normalized_shape"]) != 1:
        raise NotCovered("several axes are normalised together")
    return _affine(system, args, -1)


def _group_norm(system: _System, args: _Arguments) -> Degrees:
    system.require_zero(*args.input)
    return _affine(system, args, 1)


def _affine(system: _System, args: _Arguments, axis: int) -> Degrees:
    """What is normalised has degree zero, until a weight and a bias give it theirs."""
    weight, bias = args.get("weight"), args.get("bias")
    result = list(args.expected)
    if weight is not None:
        result[axis] = weight[0] if bias is None else system.require_equal(weight[0], bias[0])
    elif bias is not None:
        system.require_zero(bias[0])
    return tuple(result)


def _reduce(system: _System, args: _Arguments) -> Degrees:
    dims = args.axes(args.get("dim"))
    system.require_zero(*(slots for number, slots in enumerate(args.input) if number in dims))
    kept = [slots for number, slots in enumerate(args.input) if number not in dims]
    return (
        tuple(() if number in dims else slots for number, slots in enumerate(args.input))
        if args.get("keepdim")
        else (*kept,)
    )


def _reshape(system: _System, args: _Arguments) -> Degrees:
    """Atoms keep their order in memory."""
    flat = list(itertools.chain(*args.input))
    return _deal(flat, args.expected)


def _deal(flat: Sequence[tuple[Atom, Form]], expected: Degrees) -> Degrees:
    if [atom for atom, _ in flat] != [atom for slots in expected for atom, _ in slots]:
        raise NotCovered("reshaped across its structure")
    rest = iter(flat)
    return tuple(tuple(itertools.islice(rest, len(slots))) for slots in expected)


def _select_part(system: _System, args: _Arguments) -> Degrees:
    """A slice: along the axis that is cut the part that has the atoms of the result."""
    if len(args.expected) != len(args.input):
        kept = [slots for number, slots in enumerate(args.input) if number != args.dim]
        system.require_zero(args.input[args.dim])
        return tuple(kept)
    return tuple(_part(slots, _atoms(wanted)) for slots, wanted in zip(args.input, args.expected, strict=True))


def _part(slots: Slots, wanted: tuple[Atom, ...]) -> Slots:
    atoms = _atoms(slots)
    found = [n for n in range(len(atoms) - len(wanted) + 1) if atoms[n : n + len(wanted)] == wanted]
    if len(found) != 1 and wanted:
        raise NotCovered("a part that cannot be told from others")
    return slots[found[0] : found[0] + len(wanted)] if wanted else ()


def _split(system: _System, args: _Arguments) -> list[Degrees]:
    dim, result, taken = args.dim, [], 0
    for part in args.expected:
        count = len(part[dim])
        result.append((*args.input[:dim], args.input[dim][taken : taken + count], *args.input[dim + 1 :]))
        taken += count
    return result


def _concatenate(system: _System, args: _Arguments) -> Degrees:
    tensors = args["tensors"]
    dim = args["dim"] % len(args.expected)
    columns = zip(*tensors, strict=True)
    return tuple(
        tuple(itertools.chain(*column)) if number == dim else system.require_equal(*column)
        for number, column in enumerate(columns)
    )


def _stack(system: _System, args: _Arguments) -> Degrees:
    joined = [system.require_equal(*column) for column in zip(*args["tensors"], strict=True)]
    joined.insert(args["dim"] % len(args.expected), ())
    return tuple(joined)


def _transpose(system: _System, args: _Arguments) -> Degrees:
    axes = list(args.input)
    first, second = (args.axis(args[name]) for name in ("dim0", "dim1"))
    axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


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
    "permute": lambda system, args: tuple(args.input[dim] for dim in args["dims"]),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "numpy_T"), lambda system, args: args.input[::-1]),
    **dict.fromkeys(("select", "slice", "narrow"), _select_part),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    "stack": _stack,
}  # fmt: skip
