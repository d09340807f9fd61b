"""The part of a system that readings share."""

from onebasin.tracing.axes.terms import Atom, Product
from onebasin.tracing.degrees.equations import System
from onebasin.tracing.slots.system import atoms_of
from onebasin.tracing.trace import Trace


def test_a_template_names_the_free_atoms_of_each_axis():
    free, other = Atom(3), Atom(2)
    system = System(Trace(), {free: "h"})
    assert system.template((free, other, Product((free, other)))) == ((free,), (), (free,))
    assert atoms_of(system.constant([free, free])) == (free, free)
