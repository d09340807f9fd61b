"""Linear maps: an axis of one operand meets an axis of another and is summed away."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from onebasin.tracing.axes.terms import Axes, Same, Unknown, resolve
from onebasin.tracing.walk import Rule, Trace

Letters = Sequence[Hashable]


def contract(trace: Trace, operands: Sequence[tuple[Axes, Letters]], result: Letters) -> Axes:
    """An Einstein summation: axes with the same letter are one axis.

    A child can depend on a parent only if their letters meet in every pair of tensors that share the child's letter: in
    x @ x.T the contracted axis is beside the rows in both operands, but those rows are not the same letter.
    """
    axes: dict[Hashable, Unknown] = {}
    by_depth = sorted({letter: None for _, letters in operands for letter in letters}, key=lambda x: _order(operands, x))
    for letter in by_depth:
        axes[letter] = trace.join(
            *(a for own, letters in operands for a, x in zip(own, letters, strict=True) if x == letter)
        )
    output = tuple(axes[letter] for letter in result)
    tensors = [*operands, (output, result)]
    for i, (own, letters) in enumerate(tensors):
        held = {x for a, x in zip(own, letters, strict=True) if _varies(a)}
        for other, theirs in tensors[:i] + tensors[i + 1 :]:
            shared = held & {x for a, x in zip(other, theirs, strict=True) if _varies(a)}
            trace.scope(*(a for a, x in zip(own, letters, strict=True) if x in shared))
    return output


def _order(operands: Sequence[tuple[Axes, Letters]], letter: Hashable) -> int:
    """Letters that all operands have are joined first: they may be the parents of the others."""
    return -sum(letter in letters for _, letters in operands)


def _varies(axis: Unknown) -> bool:
    return axis.size > 1 and not isinstance(resolve(axis), Same)


def linear(trace: Trace, a: dict[str, Any]) -> Axes:
    """Y = x W^T + b."""
    batch = [("batch", i) for i in range(len(a["input"]) - 1)]
    result = contract(trace, [(a["input"], [*batch, "in"]), (a["weight"], ["out", "in"])], [*batch, "out"])
    if a["bias"] is not None:
        trace.join(result[-1], a["bias"][0])
    return result


def matmul(trace: Trace, a: dict[str, Any]) -> Axes:
    """The matrix product with broadcasting, also of vectors; mm and bmm are special cases."""
    x, y = a["input"], a.get("other") or a.get("mat2") or a.get("vec2") or a.get("vec") or a["tensor"]
    return _product(trace, x, y)


def _product(trace: Trace, x: Axes, y: Axes) -> Axes:
    num_batch = max(len(x), len(y)) - 2
    batch = [("batch", i) for i in range(num_batch)]
    left = [*batch[num_batch - (len(x) - 2) :], "row", "inner"] if len(x) > 1 else ["inner"]
    right = [*batch[num_batch - (len(y) - 2) :], "inner", "column"] if len(y) > 1 else ["inner"]
    result = [*batch, *(["row"] if len(x) > 1 else []), *(["column"] if len(y) > 1 else [])]
    return contract(trace, [(x, left), (y, right)], result)


def addmm(trace: Trace, a: dict[str, Any]) -> Axes:
    """Input + mat1 @ mat2, and the batched form."""
    product = _product(trace, a.get("mat1") or a["batch1"], a.get("mat2") or a["batch2"])
    for added, axis in zip(reversed(a["input"]), reversed(product), strict=False):
        trace.join(axis, added)
    return product


def einsum(trace: Trace, a: dict[str, Any]) -> Axes:
    """Any equation, an ellipsis included."""
    equation = a["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = []
    for text, axes in zip(left.split(","), a["tensors"], strict=True):
        operands.append((axes, _letters(text, len(axes))))
    if arrow:
        most = max(len(letters) for _, letters in operands)
        dots = [x for _, letters in operands for x in letters if isinstance(x, int)]
        result = _letters(right, len(right.replace("...", "")) + (max(dots, default=-1) + 1 if "..." in right else 0))
        assert len(result) <= most + len(right)
    else:
        plain = [x for _, letters in operands for x in letters if not isinstance(x, int)]
        dots = sorted({x for _, letters in operands for x in letters if isinstance(x, int)}, reverse=True)
        result = [*dots, *sorted(x for x in plain if plain.count(x) == 1)]
    return contract(trace, operands, result)


def _letters(text: str, num_axes: int) -> list[Hashable]:
    """One letter an axis; the axes of an ellipsis are numbered from the right, as broadcasting aligns them."""
    if "..." not in text:
        return list(text)
    before, after = text.split("...")
    return [*before, *reversed(range(num_axes - len(before) - len(after))), *after]


def outer(trace: Trace, a: dict[str, Any]) -> Axes:
    """The outer product of two vectors."""
    return contract(trace, [(a["input"], ["row"]), (a["vec2"], ["column"])], ["row", "column"])


def embedding(trace: Trace, a: dict[str, Any]) -> Axes:
    """Rows of a table: an index selects along the first axis."""
    rows, *units = a["weight"]
    trace.pin(rows, reason="an index selects along it")
    trace.scope(*units)
    return (*a["indices"], *units)


RULES: dict[str, Rule] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "mv": matmul,
    "dot": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "einsum": einsum,
    "outer": outer,
    "embedding": embedding,
}
