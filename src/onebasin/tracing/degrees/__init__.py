"""Positive scales that leave a function alone, from the degrees of the values of its programs.

Multiply what belongs to unit i of a parameter by s_i to some power: its *degree* along that axis. The degrees of parameters
are unknown numbers. Those of every other value are sums of them: products add the degrees of their operands, ReLU and
pooling keep them. What an operation cannot keep is a linear equation: operands of a sum have equal degrees, an axis that is
summed over has degree zero, and so has everything that goes into an operation without a rule here. The solutions are the
scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onebasin.symmetries import Scale
from onebasin.tracing.axes.terms import Atom
from onebasin.tracing.degrees.equations import System
from onebasin.tracing.degrees.rules import RULES
from onebasin.tracing.slots.slot_reading import Reading
from onebasin.tracing.trace import Trace


def find_scales(trace: Trace, names: Mapping[Atom, str], keys: Iterable[str]) -> dict[str, Scale]:
    """The positive scales of the named groups, by name.

    Args:
        trace: finished, so that its atoms change no more.
        names: of groups.
        keys: of the state, in order.
    """
    system = System(trace, names)
    for program, values in trace.walks:
        Reading(system, RULES, program, values).run()
    return system.solve(list(keys))
