"""The rules, one file per family of operations, in one table by ATen name.

An operation that is not in the table, and is not tagged as elementwise by PyTorch, pins everything it touches.
"""

from onebasin.tracing.rules import (
    attention,
    contraction,
    convolution,
    diagonals,
    elementwise,
    experts,
    indexing,
    lookups,
    normalization,
    products,
    rearrangement,
    recurrent,
    reduction,
    sampling,
    scattering,
    spectral,
)
from onebasin.tracing.rules.elementwise import pointwise
from onebasin.tracing.rules.lookups import LOOKUPS
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
    **sampling.RULES,
    **products.RULES,
    **spectral.RULES,
    **diagonals.RULES,
    **experts.RULES,
    **lookups.FINDING,
}

MOVING = {"getitem", "copy", "fill", *rearrangement.RULES}
"""Operations that read no entries: they give them other positions, or leave them out."""

__all__ = ["LOOKUPS", "MOVING", "RULES", "pointwise"]
