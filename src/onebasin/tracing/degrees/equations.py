"""Unknown degrees of parameters, linear equations between them, and their solutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from onebasin.symmetries import Power, Scale
from onebasin.tracing.axes.terms import Atom, parents_of, resolve
from onebasin.tracing.slots.system import Slots, SlotSystem, TensorSlots, atoms_of
from onebasin.tracing.trace import Trace

Unknown = tuple[str, int, int]
"""The degree of a parameter: its key, an axis, and the number of the free atom in that axis."""
Form = Mapping[Unknown, Fraction]
"""A sum of unknowns with factors. The slots of a value hold its degrees, each a form."""


class System(SlotSystem):
    """The unknown degrees of the parameters of a trace, and what the operations require of them."""

    def __init__(self, trace: Trace, names: Mapping[Atom, str]):
        super().__init__(trace, names)
        self.equations: dict[Atom, list[Form]] = {}
        self.offsets = dict(self.vectors.offsets)

    def read(self, key: str) -> TensorSlots:
        """The unknown degrees of a parameter."""
        return tuple(
            tuple((atom, {(key, axis, number): Fraction(1)}) for number, atom in enumerate(atoms))
            for axis, atoms in enumerate(self.list_atoms(key))
        )

    def absorbs_offset(self, key: str) -> bool:
        """The sum has the degree, see `Scale.offsets`."""
        return True

    def constant(self, atoms: Iterable[Atom]) -> Slots:
        """Degree zero."""
        return tuple((atom, {}) for atom in atoms)

    def forbid(self, *axes: Slots) -> None:
        """Require degree zero along these axes."""
        for atom, form in itertools.chain(*axes):
            if form:
                self.equations.setdefault(atom, []).append(form)

    def equate(self, first: Slots, *others: Slots) -> Slots:
        """Require equal degrees. Along an axis that only one of them has, the others are constant: there they are zero."""
        for other in others:
            self.contract(first, tuple((atom, times(form, -1)) for atom, form in other))
        return first if first else next((other for other in others if other), ())

    def multiply(self, first: Slots, second: Slots) -> Slots:
        """The sum of degrees. Axes that do not match have degree zero both."""
        if not first or not second:
            return first or second
        if atoms_of(first) == atoms_of(second):
            return tuple((atom, plus(a, b)) for (atom, a), (_, b) in zip(first, second, strict=True))
        self.forbid(first, second)
        return self.constant(atoms_of(first))

    def divide(self, first: Slots, second: Slots) -> Slots:
        """The difference of degrees."""
        return self.multiply(first, tuple((atom, times(form, -1)) for atom, form in second))

    def contract(self, first: Slots, second: Slots) -> None:
        """Require that degrees add up to zero."""
        self.forbid(self.multiply(first, second))

    def sum_over(self, axis: Slots) -> None:
        """Require degree zero."""
        self.forbid(axis)

    def solve(self, keys: Sequence[str]) -> dict[str, Scale]:
        """A scale for each solution of a basis in which few tensors take each."""
        order = {key: number for number, key in enumerate(keys)}
        unknowns: dict[Atom, list[Unknown]] = {}
        for key in self.trace.state:
            if key in self.trace.reached:
                for slots in self.read(key):
                    for atom, form in slots:
                        unknowns.setdefault(atom, []).extend(form)
        scales: dict[str, Scale] = {}
        for atom in self.names:
            # What makes units comes first: the first of the unknowns of a solution is chosen freely, and names it.
            found = sorted(unknowns.get(atom, ()), key=lambda u: (u[1] > 0, order[u[0]], u[1:]))
            for solution in find_null_space(found, self.equations.get(atom, ())):
                scale = self._make_scale(atom, solution, taken=scales)
                scales[scale.name] = scale
        kept: dict[str, Scale] = {}
        for name, scale in scales.items():
            if not self._is_contained(scale, scales.values(), kept.values()):
                kept[name] = scale
        return kept

    def _is_contained(self, scale: Scale, scales: Iterable[Scale], kept: Iterable[Scale]) -> bool:
        """Whether a scale of a parent does what its children do with the same numbers for all: heads and units.

        Scales of the same parent that are kept already may have a part in it.
        """
        children = {self.names[a] for a in self.names if scale.group in {self.names.get(p) for p in parents_of(a)}}
        below = [other for other in scales if other.group in children]
        beside = [other for other in kept if other.group == scale.group] if below else []
        solved: dict[Unknown, dict[Unknown, Fraction]] = {}
        *_, is_new = [_solve_for(self._form_of(each, scale.group), solved) for each in (*below, *beside, scale)]
        return not is_new

    def _form_of(self, scale: Scale, group: str) -> Form:
        """Along which axes of which tensors a scale enters, and to which powers.

        Where its units fill an axis, and differ beside another axis with the units of a group, it enters along that one.
        """
        found: dict[Unknown, Fraction] = {}
        for key, powers in scale.powers.items():
            entries = sorted((self._find_home(key, power.axis, group), power.exponent) for power in powers)
            found |= {(key, axis, n): Fraction(exponent) for n, (axis, exponent) in enumerate(entries)}
        return found

    def _find_home(self, key: str, axis: int, group: str) -> int:
        key = self.trace.aliases.get(key, key)
        homes = [n for n, atoms in enumerate(self.list_atoms(key)) if group in map(self.names.get, atoms)]
        is_filled = isinstance(resolve(self.trace.state[key][axis]), Atom)
        return homes[0] if len(homes) == 1 and is_filled else axis

    def _make_scale(self, atom: Atom, solution: Mapping[Unknown, Fraction], taken: Iterable[str]) -> Scale:
        powers: dict[str, list[Power]] = {}
        aliases: dict[str, list[str]] = {}
        for key, first in self.trace.aliases.items():
            aliases.setdefault(first, []).append(key)
        for (key, axis, number), degree in solution.items():
            atoms = self.list_atoms(key)[axis]
            power = Power(axis, atoms[:number].count(atom), int(degree) if degree.denominator == 1 else float(degree))
            for each in aliases.get(key, [key]):
                powers.setdefault(each, []).append(power)
        base = name = next(iter(solution))[0]
        for number in itertools.count(2):
            if name not in taken:
                break
            name = f"{base}:{number}"
        firsts = {key: self.trace.aliases.get(key, key) for key in powers}
        offsets = {key: self.offsets[first] for key, first in firsts.items() if first in self.offsets}
        return Scale(name, self.names[atom], {key: tuple(entries) for key, entries in powers.items()}, offsets)


def find_null_space(unknowns: Sequence[Unknown], equations: Iterable[Form]) -> list[dict[Unknown, Fraction]]:
    """A basis of the solutions; each begins with the unknown that it is one at, and those of all others vanish there."""
    order = {unknown: number for number, unknown in enumerate(unknowns)}
    solved: dict[Unknown, dict[Unknown, Fraction]] = {}
    for equation in equations:
        _solve_for(equation, solved, order)
    found = []
    for free in unknowns:
        if free not in solved:
            found.append({free: Fraction(1), **{u: form[free] for u, form in solved.items() if form.get(free)}})
    return [_make_integral(solution) for solution in found]


def _solve_for(
    equation: Form, solved: dict[Unknown, dict[Unknown, Fraction]], order: Mapping[Unknown, int] | None = None
) -> bool:
    """Solve an equation for the last of its unknowns in some order, and what is solved already with it.

    Returns:
        False if it follows from what is solved already.
    """
    form = _substitute(equation, solved)
    if not form:
        return False
    pivot = max(form, key=None if order is None else order.__getitem__)
    rest = {u: -c / form[pivot] for u, c in form.items() if u != pivot}
    for other, value in solved.items():
        if pivot in value:
            solved[other] = _substitute(value, {pivot: rest})
    solved[pivot] = rest
    return True


def _substitute(form: Form, solved: Mapping[Unknown, Form]) -> dict[Unknown, Fraction]:
    result: dict[Unknown, Fraction] = {}
    for unknown, factor in form.items():
        for other, inner in solved[unknown].items() if unknown in solved else ((unknown, Fraction(1)),):
            result[other] = result.get(other, Fraction(0)) + factor * inner
    return {unknown: factor for unknown, factor in result.items() if factor}


def _make_integral(solution: dict[Unknown, Fraction]) -> dict[Unknown, Fraction]:
    common = math.lcm(*(factor.denominator for factor in solution.values()))
    return {unknown: factor * common for unknown, factor in solution.items()}


def plus(first: Form, second: Form) -> Form:
    """The sum of two forms, without unknowns that cancel out."""
    total = dict(first)
    for unknown, factor in second.items():
        total[unknown] = total.get(unknown, Fraction(0)) + factor
    return {unknown: factor for unknown, factor in total.items() if factor}


def times(form: Form, factor: int | Fraction) -> Form:
    """A form times a number."""
    return {unknown: factor * value for unknown, value in form.items()}
