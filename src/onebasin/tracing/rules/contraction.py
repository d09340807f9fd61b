"""Linear maps: an axis of one operand meets an axis of another and is summed over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from onebasin.tracing.axes.terms import Axes, AxisTerm, Uniform, resolve
from onebasin.tracing.trace import Arguments, Rule, Trace

Letters = Sequence[Hashable]


def contract(trace: Trace, operands: Sequence[tuple[Axes, Letters]], result: Letters) -> Axes:
    """An Einstein summation: axes with the same letter are one axis.

    A child can depend on a parent only if their letters occur together in every pair of tensors that share the child's
    letter. In x @ x.T the contracted axis is beside the rows in both operands, but those rows are not the same letter.
    """
    axes: dict[Hashable, AxisTerm] = {}
    by_depth = sorted({letter: None for _, letters in operands for letter in letters}, key=lambda x: _order(operands, x))
    for letter in by_depth:
        axes[letter] = trace.join(
            *(axis for own, letters in operands for axis, x in zip(own, letters, strict=True) if x == letter)
        )
    for letter in set(axes).difference(result):
        trace.sum_over(*(axis for own, letters in operands for axis, x in zip(own, letters, strict=True) if x == letter))
    output = tuple(axes[letter] for letter in result)
    tensors = [*operands, (output, result)]
    varying = [{x for axis, x in zip(own, letters, strict=True) if _varies(axis)} for own, letters in tensors]
    for i, (own, letters) in enumerate(tensors):
        for j in range(len(tensors)):
            if j != i:
                shared = varying[i] & varying[j]
                trace.scope(*(axis for axis, x in zip(own, letters, strict=True) if x in shared))
    return output


def _order(operands: Sequence[tuple[Axes, Letters]], letter: Hashable) -> int:
    """Letters that all operands have are joined first, because they may be the parents of the others."""
    return -sum(letter in letters for _, letters in operands)


def _varies(axis: AxisTerm) -> bool:
    return axis.size > 1 and not isinstance(resolve(axis), Uniform)


def linear(trace: Trace, args: Arguments) -> Axes:
    """Y = x W^T + b; a weight that is a vector has one output without an axis."""
    batch = [("batch", i) for i in range(len(args.input) - 1)]
    out = ["out"] * (len(args["weight"]) - 1)
    result = contract(trace, [(args.input, [*batch, "in"]), (args["weight"], [*out, "in"])], [*batch, *out])
    for axis in args["bias"] or ():
        trace.join(result[-1], axis)
    return result


def matmul(trace: Trace, args: Arguments) -> Axes:
    """The matrix product with broadcasting, also of vectors; mm and bmm are special cases."""
    return _multiply(trace, *args.operands)


def _multiply(trace: Trace, x: Axes, y: Axes) -> Axes:
    left, right, result = matmul_letters(len(x), len(y))
    return contract(trace, [(x, left), (y, right)], result)


def matmul_letters(num_left: int, num_right: int) -> tuple[Letters, Letters, Letters]:
    """The letters of two operands with so many axes, and of their matrix product."""
    num_batch = max(num_left, num_right) - 2
    batch = [("batch", i) for i in range(num_batch)]
    left = [*batch[num_batch - (num_left - 2) :], "row", "inner"] if num_left > 1 else ["inner"]
    right = [*batch[num_batch - (num_right - 2) :], "inner", "column"] if num_right > 1 else ["inner"]
    return left, right, [*batch, *(["row"] if num_left > 1 else []), *(["column"] if num_right > 1 else [])]


def addmm(trace: Trace, args: Arguments) -> Axes:
    """Input + mat1 @ mat2, and the batched form."""
    added, *factors = args.operands
    product = _multiply(trace, *factors)
    for axis, other in zip(reversed(product), reversed(added), strict=False):
        trace.join(axis, other)
    return product


def einsum(trace: Trace, args: Arguments) -> Axes:
    """Any equation, an ellipsis included."""
    letters, result = einsum_letters(args["equation"], [len(axes) for axes in args["tensors"]])
    return contract(trace, list(zip(args["tensors"], letters, strict=True)), result)


def einsum_letters(equation: str, num_axes: Sequence[int]) -> tuple[Sequence[Letters], Letters]:
    """The letters of operands with so many axes each, and of the result of an equation."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = [_letters(text, count) for text, count in zip(left.split(","), num_axes, strict=True)]
    letters = [letter for own in operands for letter in own]
    dots = sorted({letter for letter in letters if isinstance(letter, int)}, reverse=True)
    if arrow:
        before, _, after = right.partition("...")
        return operands, [*before, *(dots if "..." in right else []), *after]
    return operands, [*dots, *sorted(x for x in letters if isinstance(x, str) and letters.count(x) == 1)]


def _letters(text: str, num_axes: int) -> list[Hashable]:
    """One letter per axis. The axes of an ellipsis are numbered from the right, as broadcasting aligns them."""
    if "..." not in text:
        return list(text)
    before, after = text.split("...")
    return [*before, *reversed(range(num_axes - len(before) - len(after))), *after]


def outer(trace: Trace, args: Arguments) -> Axes:
    """The outer product of two vectors."""
    x, y = args.operands
    return contract(trace, [(x, ["row"]), (y, ["column"])], ["row", "column"])


def embedding(trace: Trace, args: Arguments) -> Axes:
    """Rows of a table: an index selects along the first axis."""
    rows, *units = args["weight"]
    trace.pin(rows, reason="an index selects along it")
    trace.scope(*units)
    return (*args["indices"], *units)


RULES: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
    "einsum": einsum,
    "outer": outer,
    "embedding": embedding,
}
