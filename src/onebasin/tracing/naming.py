"""From a finished walk to a Symmetry: atoms get names, terms become layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import reduce

from torch import Tensor, nn

from onebasin.symmetries import Group, Pin, Site, Symmetry
from onebasin.symmetries.layout import Factor, Layout, Product, Sum, Term
from onebasin.symmetries.layout import names as names_in
from onebasin.tracing.axes.scopes import settle
from onebasin.tracing.axes.terms import Atom, Cases, Unknown, leaves, parents_of, resolve
from onebasin.tracing.axes.unification import join
from onebasin.tracing.walk import Trace

_INTERLEAVED = Pin("interleaved segments are treated alike")


def build(trace: Trace, model: nn.Module, state: Mapping[str, Tensor], ties: tuple[tuple[str, ...], ...]) -> Symmetry:
    """Name the groups and write down the layout of every tensor of the state."""
    _settle(trace)
    alias = {key: keys[0] for keys in ties for key in keys}
    reached = {key for key in state if alias.get(key, key) in trace.reached}
    names = _name_groups(trace, state, alias, reached)
    layouts: dict[str, Layout] = {}
    pinned: dict[tuple[str, int], Pin] = {}
    for key, tensor in state.items():
        axes = trace.state.get(alias.get(key, key))
        if axes is None:
            layouts[key] = tuple(Factor(n) for n in tensor.shape)
            continue
        layouts[key] = tuple(_convert(axis, names) for axis in axes)
        for number, axis in enumerate(axes):
            reasons = [atom.pin for atom in leaves(axis) if atom.pin and atom.size > 1]
            if reasons:
                pinned[key, number] = reasons[0]
    free = {atom for atom in names if not atom.pin}
    groups = {names[a]: Group(names[a], a.size, _parent_names(a, names)) for a in names if a in free}
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    hidden, movable = _count_units(trace)
    return Symmetry(
        groups=groups,
        layouts=layouts,
        ties=ties,
        pinned=pinned,
        unreached=tuple(key for key in state if key in parameters and key not in reached),
        sites=_sites(trace, model, names, groups),
        num_hidden=hidden,
        num_free=movable,
        is_traced=True,
    )


def _settle(trace: Trace) -> None:
    """Settle the scopes; a parameter's axis that would need a structure of its own inside another factor gives it up."""
    while True:
        settle(trace.scopes)
        cases = [c for axes in trace.state.values() for axis in axes for c in _cases(resolve(axis))]
        if not cases:
            return
        for case in cases:
            reduce(lambda a, b: join(a, b, _INTERLEAVED), case.parts)


def _cases(term: Unknown) -> Iterable[Cases]:
    match term:
        case Cases():
            yield term
        case Product(children) | Sum(children):
            for child in children:
                yield from _cases(child)


def _name_groups(trace: Trace, state: Mapping[str, Tensor], alias: Mapping[str, str], reached: set[str]) -> dict[Atom, str]:
    """A name for every free atom of a parameter, and for every pinned one that a family hangs on."""
    found: dict[Atom, str] = {}
    taken: set[str] = set()

    def name(atom: Atom, key: str) -> None:
        base = re.sub(r"[\s()+\[\],]", "_", key.rpartition(".")[0] or key)
        base = key if base.isdigit() else base
        unique, number = base, 2
        while unique in taken:
            unique, number = f"{base}:{number}", number + 1
        taken.add(unique)
        found[atom] = unique

    def visit(key: str, axes: Iterable[Unknown]) -> None:
        for atom in [a for axis in axes for a in leaves(axis) if a.size > 1 and a.pin is None]:
            for needed in (*sorted(parents_of(atom), key=lambda p: p.birth), atom):
                if needed not in found:
                    name(needed, key)

    known = [(key, trace.state[alias.get(key, key)]) for key in state if key in reached]
    for key, axes in known:  # the first axis of a weight is what it makes: units are named after their maker
        visit(key, axes[:1] if len(axes) > 1 else ())
    for key, axes in known:
        visit(key, axes)
    return found


def _parent_names(atom: Atom, names: Mapping[Atom, str]) -> tuple[str, ...]:
    ordered = sorted(parents_of(atom), key=lambda p: (len(parents_of(p)) if not p.pin else 0, p.birth))
    return tuple(names[p] for p in ordered)


def _convert(term: Unknown, names: Mapping[Atom, str]) -> Term:
    match resolve(term):
        case Atom() as atom:
            return Factor(atom.size, names.get(atom))
        case Product(children):
            parts = _fuse([_convert(c, names) for c in children], math.prod)
            return Factor(1) if not parts else parts[0] if len(parts) == 1 else Product(tuple(parts))
        case Sum(children):
            parts = _fuse([_convert(c, names) for c in children], sum)
            return parts[0] if len(parts) == 1 else Sum(tuple(parts))
    raise AssertionError(f"{term} is not the axis of a parameter")


def _fuse(children: list[Term], combine) -> list[Term]:
    """Neighbouring fixed extents as one: nobody needs to tell them apart any more."""
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


def _num_outputs(term: Unknown, outputs: set[Atom]) -> int:
    """How many positions are a model output: in a product, all of whose factors are."""
    match term:
        case Sum(children):
            return sum(_num_outputs(c, outputs) for c in children)
    return term.size if outputs.issuperset(leaves(term)) else 0


def _free_share(term: Unknown) -> float:
    """The share of positions that some group moves."""
    match term:
        case Atom():
            return 0.0 if term.pin else 1.0
        case Product(children):
            return 1 - math.prod(1 - _free_share(c) for c in children)
        case Sum(children):
            return sum(c.size * _free_share(c) for c in children) / term.size
        case Cases(_, children):
            return min(_free_share(c) for c in children)
    return 0.0


def _sites(
    trace: Trace, model: nn.Module, names: Mapping[Atom, str], groups: Mapping[str, Group]
) -> dict[str, tuple[Site, ...]]:
    leaf_modules = {path: module for path, module in model.named_modules() if path and not any(module.children())}
    found: dict[str, list[Site]] = {name: [] for name in groups}
    for path, call, axes, several in trace.modules:
        if path not in leaf_modules or several != isinstance(leaf_modules[path], (nn.RNNBase, nn.LSTMCell)):
            continue
        if any(True for axis in axes for _ in _unnamed(resolve(axis), names)):
            continue
        layout = tuple(_convert(axis, names) for axis in axes)
        for name in sorted(names_in(layout) & groups.keys()):
            found[name].append(Site(path, call, layout))
    return {name: tuple(sites) for name, sites in found.items()}


def _unnamed(term: Unknown, names: Mapping[Atom, str]) -> Iterable[Unknown]:
    """Parts of an activation that no parameter's layout can express."""
    match term:
        case Atom():
            if not term.pin and term.size > 1 and term not in names:
                yield term
        case Product(children) | Sum(children):
            for child in children:
                yield from _unnamed(child, names)
        case _:
            yield term
