"""The rules, one file per family of operations, in one table by ATen name.

An operation that is not in the table, and is not tagged as elementwise by PyTorch, pins everything it touches.
"""

from onebasin.tracing.rules import (
    attention,
    contraction,
    convolution,
    elementwise,
    experts,
    indexing,
    normalization,
    rearrangement,
    recurrent,
    reduction,
    scattering,
)
from onebasin.tracing.rules.elementwise import pointwise
from onebasin.tracing.trace import Rule

RULES: dict[str, Rule] = {
    **contraction.RULES,
    **convolution.RULES,
    **normalization.RULES,
    **elementwise.RULES,
    **reduction.RULES,
    **rearrangement.RULES,
    **indexing.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **scattering.RULES,
    **experts.RULES,
}

__all__ = ["RULES", "pointwise"]
