"""The rules, one file for each family of operations, in one table by ATen name.

An operation that is not in the table, and is not tagged as elementwise by PyTorch, pins everything it touches.
"""

from onebasin.tracing.rules import (
    attention,
    contraction,
    convolution,
    elementwise,
    indexing,
    normalization,
    rearrangement,
    recurrent,
    reduction,
)
from onebasin.tracing.rules.elementwise import pointwise
from onebasin.tracing.rules.normalization import STATISTICS
from onebasin.tracing.walk import Rule

RULES: dict[str, Rule] = {}
for family in (
    contraction,
    convolution,
    normalization,
    elementwise,
    reduction,
    rearrangement,
    indexing,
    attention,
    recurrent,
):
    RULES.update(family.RULES)

__all__ = ["RULES", "STATISTICS", "pointwise"]
