"""Mixtures of experts: rows that are sorted by expert, each multiplied by the matrix of its own."""

from __future__ import annotations

from onebasin.tracing.axes.terms import Axes
from onebasin.tracing.rules.contraction import contract
from onebasin.tracing.trace import Arguments, NotCovered, Rule, Trace

_REASON = "offsets say which rows are whose"


def grouped_mm(trace: Trace, args: Arguments) -> Axes:
    """Rows (row, in) times a matrix per expert (expert, in, out), with the row where each expert ends."""
    rows, weights, offsets = args.operands[:3]
    if (len(rows), len(weights), len(offsets)) != (2, 3, 1) or len(args.operands) > 3:
        raise NotCovered("only rows of one matrix, grouped by offsets, are covered")
    trace.pin(rows[0], weights[0], *offsets, reason=_REASON)
    _, made = contract(trace, [(rows, ["row", "in"]), (weights, ["expert", "in", "out"])], ["row", "out"])
    trace.units[args.node.name,] = made
    return (trace.pinned(rows[0].size, _REASON), made)  # equal rows may go to different experts


RULES: dict[str, Rule] = dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), grouped_mm)
