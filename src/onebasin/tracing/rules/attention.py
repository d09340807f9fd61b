"""Attention: heads move as blocks, and inside each head the units that are summed over.

Queries and keys meet in their units, scores and values in the positions. So both are contractions, and heads, positions and
units each follow from the rules of those. With grouped queries the heads of the queries are (key-value head, query).
"""

from __future__ import annotations

from onebasin.tracing.axes.terms import Axes, Product, Uniform
from onebasin.tracing.rules.contraction import contract
from onebasin.tracing.rules.elementwise import broadcast
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace


def attention(trace: Trace, args: Arguments) -> Axes:
    """softmax(q k^T + mask) v, over the positions of the keys."""
    query, key, value, mask = args["query"], args["key"], args["value"], args["attn_mask"]
    if args["dropout_p"]:
        raise NotCovered("dropout is on in eval mode")
    if max(len(key), len(value), len(mask or ())) > len(query):
        raise NotCovered("queries with fewer axes than keys, values or mask")
    if args["enable_gqa"]:
        key, value = (_repeat_heads(x, query[-3].size) for x in (key, value))
    batch = [("batch", i) for i in reversed(range(len(query) - 2))]
    scores = contract(
        trace,
        [(query, [*batch, "to", "unit"]), (key, [*batch[len(query) - len(key) :], "from", "unit"])],
        [*batch, "to", "from"],
    )
    if mask is not None:
        scores = broadcast(trace, scores, mask)
        trace.scope(*scores)
    if args["is_causal"]:
        reason = "a causal mask orders positions"
        trace.pin(*scores[-2:], reason=reason)
        scores = (*scores[:-2], *(trace.pinned(axis.size, reason) for axis in scores[-2:]))
    return contract(
        trace,
        [(scores, [*batch, "to", "from"]), (value, [*batch[len(query) - len(value) :], "from", "made"])],
        [*batch, "to", "made"],
    )


def _repeat_heads(axes: Axes, num_heads: int) -> Axes:
    """Every key-value head serves several query heads in a row."""
    *batch, heads, positions, units = axes
    times = num_heads // heads.size
    return (*batch, Product((heads, Uniform(times, repeats=True))) if times > 1 else heads, positions, units)


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention}
