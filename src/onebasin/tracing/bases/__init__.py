"""Changes of basis that leave a function alone: rotations of a residual stream, invertible maps inside a head.

Multiply a value along an axis by a matrix M, and what it meets in a sum of products by the inverse transpose of M. Linear
maps keep any M, division by a length keeps an orthogonal one, a norm that takes the mean out an orthogonal one that keeps
the vector of ones, and all other operations no more than permutations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onebasin.symmetries import Basis, Group
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.bases.basis_rules import RULES
from onebasin.tracing.bases.classes import System
from onebasin.tracing.slots.slot_reading import Reading
from onebasin.tracing.trace import Trace


def find_bases(
    trace: Trace, names: Mapping[Atom, str], groups: Mapping[str, Group], keys: Iterable[str], fixed: Iterable[str]
) -> tuple[dict[str, Basis], dict[str, float | None]]:
    """The changes of basis of the named groups, by name; they hold in eval mode. And the gains that units are multiplied by.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
        groups: by name.
        keys: of the state, in order.
        fixed: keys of parameters that are filled with one number and stay so.
    """
    system = System(trace, names, fixed)
    for program, values in trace.walks:
        if not program.training:
            Reading(system, RULES, program, values).run()
    return system.solve(list(keys), groups), system.gains
