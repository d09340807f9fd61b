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
    result = contract(trace, [(rows, ["row", "in"]), (weights, ["expert", "in", "out"])], ["row", "out"])
    trace.units[args.node.name,] = result[1]
    return result


RULES: dict[str, Rule] = dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), grouped_mm)
