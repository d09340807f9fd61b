"""Other products of two tensors, and distances between their rows: axes meet in pairs, like those of a matrix product."""

from __future__ import annotations

from onebasin.tracing.axes.terms import ONE, Axes, Product
from onebasin.tracing.rules.contraction import contract
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace


def distances(trace: Trace, args: Arguments) -> Axes:
    """Distances between all rows of one tensor and all of another; the coordinates are summed over."""
    x, y = args["x1"], args["x2"]
    batch = [("batch", i) for i in reversed(range(max(len(x), len(y)) - 2))]
    left = [*batch[len(batch) - len(x) + 2 :], "row", "coordinate"]
    right = [*batch[len(batch) - len(y) + 2 :], "column", "coordinate"]
    return contract(trace, [(x, left), (y, right)], [*batch, "row", "column"])


def similarity(trace: Trace, args: Arguments) -> Axes:
    """Cosine similarity and distance of aligned vectors: one axis is summed over."""
    joined = broadcast(trace, args["x1"], args["x2"])
    trace.scope(*joined)  # the products, before they are summed
    dim = args.get("dim", -1) % len(joined)
    return tuple(ONE if i == dim else axis for i, axis in enumerate(joined) if i != dim or args.get("keepdim"))


def bilinear(trace: Trace, args: Arguments) -> Axes:
    """y[o] = sum_ij x1[i] w[o, i, j] x2[j] + b[o]."""
    x, y, weight = args["input1"], args["input2"], args["weight"]
    batch = [("batch", i) for i in range(len(x) - 1)]
    operands = [(x, [*batch, "left"]), (y, [*batch, "right"]), (weight, ["out", "left", "right"])]
    *kept, made = contract(trace, operands, [*batch, "out"])
    if args["bias"] is not None:
        made = trace.join(made, args["bias"][0])
    trace.units[args.name("weight"),] = made
    return (*kept, made)


def tensordot(trace: Trace, args: Arguments) -> Axes:
    """A product summed over some axes of both tensors."""
    x, y = args.input, args["other"]
    left, right = [("left", i) for i in range(len(x))], [("right", i) for i in range(len(y))]
    for number, (i, j) in enumerate(zip(args["dims_self"], args["dims_other"], strict=True)):
        left[i], right[j] = ("sum", number), ("sum", number)
    return contract(trace, [(x, left), (y, right)], [letter for letter in [*left, *right] if letter[0] != "sum"])


def inner(trace: Trace, args: Arguments) -> Axes:
    """A product summed over the last axes; a number multiplies all entries."""
    x, y = args.input, args["other"]
    if not x or not y:
        return x or y
    left, right = [("left", i) for i in range(len(x) - 1)], [("right", i) for i in range(len(y) - 1)]
    return contract(trace, [(x, [*left, "inner"]), (y, [*right, "inner"])], [*left, *right])


def kron(trace: Trace, args: Arguments) -> Axes:
    """Each axis of the result is a pair of axes, the first tensor's outside."""
    num_axes = len(args.shape)
    x, y = ((ONE,) * (num_axes - len(axes)) + axes for axes in (args.input, args["other"]))
    left, right = [("left", i) for i in range(num_axes)], [("right", i) for i in range(num_axes)]
    made = contract(trace, [(x, left), (y, right)], [*left, *right])
    return tuple(Product(pair) for pair in zip(made[:num_axes], made[num_axes:], strict=True))


def multi_dot(trace: Trace, args: Arguments) -> Axes:
    """A chain of matrix products, in which the first and the last may be vectors."""
    operands = []
    for number, axes in enumerate(args["tensors"] if "tensors" in args else args["matrices"]):
        letters = [number, number + 1] if len(axes) == 2 else [1] if number == 0 else [number]
        operands.append((axes, letters))
    if len(operands) < 2:
        raise NotCovered("a chain of one tensor")
    ends = [*operands[0][1][:-1], *operands[-1][1][1:]]
    return contract(trace, operands, ends)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("cdist", "_cdist_forward", "_euclidean_dist"), distances),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), similarity),
    "bilinear": bilinear,
    "tensordot": tensordot,
    "inner": inner,
    "kron": kron,
    **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), multi_dot),
}
