"""From a finished trace to a Symmetry: atoms get names, terms become layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from torch import nn

from onebasin.programs.graph import Program
from onebasin.symmetries import NEVER_MET, NEVER_READ, Basis, Group, Pin, Scale, Site, Symmetry
from onebasin.symmetries.layout import Factor, Layout, Product, Sum, Switch, Term
from onebasin.symmetries.layout import names as names_in
from onebasin.tensors.states import read_state
from onebasin.tracing.axes.scopes import solve_scopes
from onebasin.tracing.axes.terms import (
    Atom,
    Axes,
    AxisTerm,
    Piecewise,
    follow_links,
    has_uniform_parts,
    leaves,
    parents_of,
    resolve,
    same_selector,
)
from onebasin.tracing.axes.unification import is_fixed, join_parts, pin
from onebasin.tracing.bases import find_bases
from onebasin.tracing.degrees import find_scales
from onebasin.tracing.positions import pin_broken_orders
from onebasin.tracing.slots.vectors import find_vectors
from onebasin.tracing.trace import Trace

Kinds = Literal["permutation", "positive", "all"]
"""Which symmetries to find; see `onebasin.symmetry`."""
_ALONE = Pin("each of its entries is told apart")
_INTERLEAVED = Pin("interleaved segments are treated alike")


def to_symmetry(trace: Trace, model: nn.Module, programs: Iterable[Program], kinds: Kinds = "permutation") -> Symmetry:
    """Name the groups and find the layout of every tensor of the state, from the trace of these programs.

    Args:
        trace: of the programs; it is finished.
        model: that they are calls of.
        programs: the calls.
        kinds: what to find beside the groups.
    """
    state = read_state(model).shapes
    if any(isinstance(resolve(axis), Piecewise) for axes in trace.state.values() for axis in axes):
        _solve(trace)  # parts that are not read become those that are, before what is never read is fixed
    unread = _pin_unread(trace, state)
    names = _name_groups(trace, state)
    layouts: dict[str, Layout] = {}
    pinned: dict[tuple[str, int], Pin] = {}
    for key, tensor in state.items():
        axes = trace.state.get(trace.aliases.get(key, key))
        if axes is None:
            layouts[key] = tuple(Factor(n) for n in tensor.shape)
            continue
        layouts[key] = _convert_axes(axes, names)
        for number, axis in enumerate(axes):
            reasons = [atom.pin for atom in leaves(axis) if atom.pin and atom.size > 1]
            if reasons:
                pinned[key, number] = reasons[0]
            elif axis.size > 1 and all(atom.size == 1 for atom in leaves(axis)):
                pinned[key, number] = _ALONE
    groups = {names[a]: Group(names[a], a.size, _parent_names(a, names)) for a in names if not a.pin}
    num_hidden, num_free = _count_units(trace)
    scales = find_scales(trace, names, state) if kinds != "permutation" else {}
    fixed, bases, gains = {}, {}, {}
    if kinds == "all":
        filled = _find_filled(trace, model, names)
        bases, gains = find_bases(trace, names, groups, state, filled)
        fixed = {key: filled[key] for key in filled if _is_needed(trace.state[trace.aliases.get(key, key)], names, bases)}
        scales = {name: scale for name, scale in scales.items() if _is_apart(scale, bases.values(), fixed)}
    return Symmetry(
        groups=groups,
        layouts=layouts,
        ties=trace.ties,
        pinned=pinned,
        unreached=find_unreached(trace, model),
        unread=unread,
        sites=_sites(trace, model, names, groups),
        num_hidden=num_hidden,
        num_free=num_free,
        is_traced=True,
        front_ends=tuple(program.front_end for program in programs),
        scales=scales,
        bases=bases,
        fixed=fixed,
        gains=gains,
    )


def _find_filled(trace: Trace, model: nn.Module, names: Mapping[Atom, str]) -> dict[str, float]:
    """The vectors along the units of a group that are filled with ones, each with the number that it is filled with.

    A vector that is always read with a number added to it is one where the sum is one.
    """
    found, offsets = {}, find_vectors(trace).offsets
    for key, value in model.named_parameters(remove_duplicate=False):
        axes = trace.state.get(trace.aliases.get(key, key))
        is_along_units = axes is not None and any(atom in names for axis in axes for atom in leaves(axis))
        one = 1.0 - offsets.get(trace.aliases.get(key, key), 0.0)
        if value.dim() == 1 and is_along_units and not value.is_meta and bool((value == one).all()):
            found[key] = one
    return found


def _is_needed(axes: Axes, names: Mapping[Atom, str], bases: Mapping[str, Basis]) -> bool:
    """Whether a vector that is filled with ones has to stay so: units that are mixed are along it.

    Changes of sign need no such thing: whatever the numbers are, units are multiplied by them one by one.
    """
    mixed = {basis.group for basis in bases.values() if basis.kind != "signed"}
    return any(names.get(atom) in mixed for axis in axes for atom in leaves(axis))


def _is_apart(scale: Scale, bases: Iterable[Basis], fixed: Collection[str]) -> bool:
    """Whether a scale multiplies nothing that is fixed, and no axis that a change of basis mixes."""
    alike = (basis for basis in bases if basis.group == scale.group and basis.kind != "signed")
    mixed = {(key, p.axis, p.number) for basis in alike for key, places in basis.places.items() for p in places}
    mine = {(key, p.axis, p.number) for key, ps in scale.powers.items() for p in ps}
    return mine.isdisjoint(mixed) and scale.powers.keys().isdisjoint(fixed)


def find_unreached(trace: Trace, model: nn.Module) -> tuple[str, ...]:
    """The parameters that no operation reads."""
    keys = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    return tuple(key for key in keys if trace.aliases.get(key, key) not in trace.reached)


def _pin_unread(trace: Trace, state: Iterable[str]) -> dict[tuple[str, int], Pin]:
    """Fix what the calls did not read of parameters that they used, and return the axes with the reasons.

    What met only constants may meet anything in another call: the zero state of a recurrent cell at its second step is what
    the cell has made. So such a parameter is fixed as a whole.
    """
    unmet = {leaf for atom in trace.unmet for leaf in leaves(atom)}
    found: dict[tuple[str, int], Pin] = {}
    for key in state:
        first = trace.aliases.get(key, key)
        if first not in trace.reached:
            continue
        read = {leaf for atom in trace.read.get(first, ()) for leaf in leaves(atom)}
        for number, axis in enumerate(trace.state[first]):
            for atom in leaves(axis):
                if atom not in read and (not atom.pin or atom.pin in (NEVER_READ, NEVER_MET)):
                    found[key, number] = NEVER_MET if atom in unmet else NEVER_READ
                    pin(atom, found[key, number])
    for key, _ in [axis for axis, why in found.items() if why is NEVER_MET]:
        for axis in trace.state[trace.aliases.get(key, key)]:
            pin(axis, NEVER_MET)
    return found


def _solve(trace: Trace) -> None:
    """Solve the scopes. Where an axis of a parameter is piecewise, and no layout can say so, all parts are joined."""
    while True:
        solve_scopes(trace.scopes, trace.settled)
        found = [
            term
            for key, axes in trace.state.items()
            for axis in axes
            for term in _piecewise_terms(resolve(axis))
            if not _is_switch(trace, key, axis)
        ]
        free = [term for term in found if not is_fixed(term)]
        if not free and not pin_broken_orders(trace.orders, trace.state.values()):
            return
        for term in free:
            join_parts(term, _INTERLEAVED)


def _is_switch(trace: Trace, key: str, axis: AxisTerm) -> bool:
    """Whether an axis is another term beside each segment of one other axis, so that a layout can say it.

    Each part must be read: rows of a table that this call does not read belong to the same units as those that it reads.
    """
    term = resolve(axis)
    if not isinstance(term, Piecewise):
        return False
    selector = _find_selector(trace.state[key], term)
    read = {leaf for atom in trace.read.get(key, ()) for leaf in leaves(atom)}
    return selector is not None and all(_is_plain(part) and read >= set(leaves(part)) for part in term.parts)


def _find_selector(axes: Axes, term: Piecewise) -> AxisTerm | None:
    """The axis of a tensor whose segments decide between the parts of another; None if more than one has segments."""
    cut = [axis for axis in axes if isinstance(resolve(axis), Sum)]
    if len(cut) != 1 or not isinstance(selector := follow_links(cut[0]), Atom):
        return None
    return cut[0] if same_selector(selector, term.selector) else None


def _is_plain(term: AxisTerm) -> bool:
    """Whether a term is free in every part, and depends on nothing else."""
    if has_uniform_parts(term) or any(True for _ in _piecewise_terms(resolve(term))):
        return False
    return not any(parents_of(atom) for atom in leaves(term))


def _repeat_parts(term: Piecewise) -> list[AxisTerm]:
    """The parts of a term, one for each segment of its selector as it is now: segments may have been cut further."""
    assert isinstance(term.selector.link, Sum)
    pieces = map(resolve, term.selector.link.parts)
    counts = [len(piece.parts) if isinstance(piece, Sum) else 1 for piece in pieces]
    return [part for part, count in zip(term.parts, counts, strict=True) for _ in range(count)]


def _piecewise_terms(term: AxisTerm) -> Iterable[Piecewise]:
    match term:
        case Piecewise():
            yield term
        case Product(children) | Sum(children):
            for child in children:
                yield from _piecewise_terms(child)


def _name_groups(trace: Trace, state: Iterable[str]) -> dict[Atom, str]:
    """Name every free atom of a parameter, and every pinned one that a family depends on."""
    _solve(trace)
    found: dict[Atom, str] = {}
    taken: set[str] = set()

    def name(atom: Atom, key: str) -> None:
        base = re.sub(r"[\s()+|\[\],]", "_", key.rpartition(".")[0] or key)
        base = key if base.isdigit() else base
        unique, number = base, 2
        while unique in taken:
            unique, number = f"{base}:{number}", number + 1
        taken.add(unique)
        found[atom] = unique

    def visit(key: str, axes: Iterable[AxisTerm]) -> None:
        for atom in [a for axis in axes for a in leaves(axis) if a.size > 1 and a.pin is None]:
            for needed in (*sorted(parents_of(atom), key=lambda p: p.number), atom):
                if needed not in found:
                    name(needed, key)

    reached = [(key, trace.state[first]) for key in state if (first := trace.aliases.get(key, key)) in trace.reached]
    for key, axes in reached:  # the first axis of a weight is its output: units are named after what makes them
        visit(key, axes[:1] if len(axes) > 1 else ())
    for key, axes in reached:
        visit(key, axes)
    return found


def _parent_names(atom: Atom, names: Mapping[Atom, str]) -> tuple[str, ...]:
    ordered = sorted(parents_of(atom), key=lambda p: (len(parents_of(p)) if not p.pin else 0, p.number))
    return tuple(names[p] for p in ordered)


def _convert_axes(axes: Axes, names: Mapping[Atom, str]) -> Layout:
    """The layout of a parameter. Segments that decide between the parts of another axis are all kept."""
    switches = [term for axis in axes if isinstance(term := resolve(axis), Piecewise) and not is_fixed(term)]
    deciding = [_find_selector(axes, term) for term in switches]
    return tuple(_convert(axis, names, keeps_segments=any(axis is other for other in deciding)) for axis in axes)


def _convert(term: AxisTerm, names: Mapping[Atom, str], keeps_segments: bool = False) -> Term:
    match resolve(term):
        case Atom() as atom:
            return Factor(atom.size, names.get(atom))
        case Product(children):
            parts = _fuse([_convert(c, names) for c in children], math.prod)
            return Factor(1) if not parts else parts[0] if len(parts) == 1 else Product(tuple(parts))
        case Sum(children):
            parts = [_convert(c, names) for c in children]
            parts = parts if keeps_segments else _fuse(parts, sum)
            return parts[0] if len(parts) == 1 else Sum(tuple(parts))
        case Piecewise() as term:
            return Factor(term.size) if is_fixed(term) else Switch(tuple(_convert(p, names) for p in _repeat_parts(term)))
    raise AssertionError(f"{term} is not the axis of a parameter")


def _fuse(children: list[Term], combine) -> list[Term]:
    """Combine neighbouring fixed extents: nothing tells them apart any more."""
    result: list[Term] = []
    for child in children:
        fixed = isinstance(child, Factor) and child.name is None
        if fixed and result and isinstance(result[-1], Factor) and result[-1].name is None:
            result[-1] = Factor(combine([result[-1].size, child.size]))
        else:
            result.append(child)
    return result


def _count_units(trace: Trace) -> tuple[int, int]:
    outputs = {atom for term in trace.outputs for atom in leaves(term)}
    hidden = movable = 0
    for term in trace.units.values():
        hidden += term.size - _num_outputs(resolve(term), outputs)
        movable += round(term.size * _free_share(resolve(term)))
    return hidden, movable


def _num_outputs(term: AxisTerm, outputs: set[Atom]) -> int:
    """How many positions are a model output. A product is one if all its factors are."""
    match term:
        case Sum(children):
            return sum(_num_outputs(c, outputs) for c in children if any(True for _ in leaves(c)))
    return term.size if outputs.issuperset(leaves(term)) else 0


def _free_share(term: AxisTerm) -> float:
    """The share of positions that some group moves."""
    match term:
        case Atom():
            return 0.0 if term.pin or term.size == 1 else 1.0
        case Product(children):
            return 1 - math.prod(1 - _free_share(c) for c in children)
        case Sum(children):
            return sum(c.size * _free_share(c) for c in children) / term.size
        case Piecewise(_, children):
            return min(_free_share(c) for c in children)
    return 0.0


def _sites(
    trace: Trace, model: nn.Module, names: Mapping[Atom, str], groups: Mapping[str, Group]
) -> dict[str, tuple[Site, ...]]:
    leaf_modules = {path: module for path, module in model.named_modules() if path and not any(module.children())}
    found: dict[str, list[Site]] = {name: [] for name in groups}
    for path, call, axes, is_first_of_several in trace.modules:
        if path not in leaf_modules or is_first_of_several != isinstance(leaf_modules[path], (nn.RNNBase, nn.LSTMCell)):
            continue
        if any(True for axis in axes for _ in _unnamed(resolve(axis), names)):
            continue
        layout = tuple(_convert(axis, names) for axis in axes)
        for name in sorted(names_in(layout) & groups.keys()):
            found[name].append(Site(path, call, layout))
    return {name: tuple(sites) for name, sites in found.items()}


def _unnamed(term: AxisTerm, names: Mapping[Atom, str]) -> Iterable[AxisTerm]:
    """Yield the parts of an activation that have no name, because no parameter has them."""
    match term:
        case Atom():
            if not term.pin and term.size > 1 and term not in names:
                yield term
        case Product(children) | Sum(children):
            for child in children:
                yield from _unnamed(child, names)
        case _:
            yield term
