"""What a symmetry is, as data: groups of units, and the layout of every tensor in terms of them."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self

from torch import Tensor, nn

from onebasin.programs.graph import FrontEnd
from onebasin.symmetries.indices import dependencies, find_parent
from onebasin.symmetries.layout import Factor, Layout, Switch, factors, fit, parse, write
from onebasin.tensors.states import Model, Ties, check_ties, find_ties, read_state

_PACKAGE = Path(__file__).parents[1]


class UnreachedWarning(UserWarning):
    """Parameters that no call used may read or write free units. If they do, a permutation changes what they compute."""


@dataclass(frozen=True)
class Group:
    """Units that are permuted together, everywhere they occur.

    Attributes:
        name: stable, from the parameter that makes the units.
        size: number of units.
        parents: a group without parents is one permutation; with parents it is a family, one permutation for each
            combination of the parents' elements (the units of each head). A parent may be a fixed extent.
        kind: what can be done to the units beside permuting them: "positive" if they have a scale, and the kinds of their
            bases, such as "orthogonal", joined by " and "; "permutation" if nothing can. Never "rotary": pairs of units that
            a rotary embedding turns together cannot be permuted, so they are no group, and `Symmetry.bases` has them. Two
            groups are equal if they differ in nothing but this.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> attention = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.zeros(1, 3, 6)
    >>> for group in ob.symmetry(attention, (x, x, x)).groups.values():
    ...     print(group.name, group.size, group.parents)
    in_proj_weight 2 ()
    in_proj_weight:2 3 ('in_proj_weight',)
    in_proj_weight:3 3 ('in_proj_weight',)
    """

    name: str
    size: int
    parents: tuple[str, ...] = ()
    kind: str = field(default="permutation", compare=False)


@dataclass(frozen=True)
class Pin:
    """Why an axis is not free: the operation, and the module it runs in."""

    reason: str
    operation: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.reason} ({self.operation}{where})" if self.operation else self.reason


NEVER_READ = Pin("these calls never read it")
NEVER_MET = Pin("these calls multiply it by constants only")


@dataclass(frozen=True)
class Site:
    """Where groups live in the activations: the output of a module, at its `call`-th use, with this layout.

    Of a recurrent layer, which returns several tensors, the first one is meant.
    """

    module: str
    call: int
    layout: Layout


class Power(NamedTuple):
    """How a scale enters a tensor: along which axis, at which factor of its group there, and to which power."""

    axis: int
    number: int
    exponent: float


@dataclass(frozen=True)
class Scale:
    """A positive number for each unit of a group that can be chosen without changing the function.

    What makes a unit is multiplied by it and what reads the unit is divided by it, or a norm takes it out again.

    Attributes:
        name: the first tensor that is multiplied by it.
        group: of the units; a family has a number for each unit of each of its members.
        powers: for each state key how the scale enters the tensor.
        offsets: for some state keys a number that is added to the tensor before it is multiplied, and taken off again: what
            a batch norm divides by is the root of its variance plus eps, and some norms multiply by 1 + weight.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> for scale in ob.symmetry(model, torch.zeros(1, 4), kinds="positive").scales.values():
    ...     print(scale.group, {key: [power.exponent for power in powers] for key, powers in scale.powers.items()})
    0.weight {'0.weight': [1], '0.bias': [1], '2.weight': [-1]}
    """

    name: str
    group: str
    powers: Mapping[str, tuple[Power, ...]]
    offsets: Mapping[str, float] = field(default_factory=dict)


class Place(NamedTuple):
    """How a basis enters a tensor: along which axis, at which factor of its group there, and whether by its dual matrix."""

    axis: int
    number: int
    is_dual: bool


BasisKind = Literal["linear", "orthogonal", "centred", "signed", "rotary"]
"""Any invertible matrix, an orthogonal one, an orthogonal one that keeps the vector of ones, a diagonal one of entries 1 and
-1, or a rotation of two units times a positive number."""


@dataclass(frozen=True)
class Basis:
    """Units of a group that can be replaced by mixtures of them without changing the function.

    What makes the units is multiplied by a matrix M and what reads them by its dual, the inverse transpose of M.

    Attributes:
        name: the first tensor that is multiplied by it.
        group: of the units; a family has a matrix for each of its members. Two units that a rotary embedding turns together
            cannot be permuted, so theirs is no group but the name of an extent in the layouts.
        kind: which matrices leave the function alone.
        places: for each state key how the matrix enters the tensor.
        parents: of the units, as of a group.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 2))
    >>> for basis in ob.symmetry(model, torch.zeros(1, 4), kinds="all").bases.values():
    ...     print(basis.group, basis.kind, list(basis.places))
    0.weight orthogonal ['0.weight', '0.bias', '2.weight']
    """

    name: str
    group: str
    kind: BasisKind
    places: Mapping[str, tuple[Place, ...]]
    parents: tuple[str, ...] = ()

    @property
    def is_rotary(self) -> bool:
        """Whether its units cannot be permuted."""
        return self.kind == "rotary"


@dataclass(frozen=True)
class Structure:
    """The data of a `Symmetry`, which describes the attributes, and how it fits a model."""

    groups: Mapping[str, Group]
    layouts: Mapping[str, Layout]
    ties: Ties = ()
    pinned: Mapping[tuple[str, int], Pin] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    unread: Mapping[tuple[str, int], Pin] = field(default_factory=dict)
    sites: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)
    num_hidden: int = 0
    num_free: int = 0
    is_traced: bool = False
    front_ends: tuple[FrontEnd, ...] = ()
    limits: tuple[str, ...] = ()
    scales: Mapping[str, Scale] = field(default_factory=dict)
    bases: Mapping[str, Basis] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let every group say its kind."""
        kinds: dict[str, dict[str, None]] = {}
        for basis in self.bases.values():
            kinds.setdefault(basis.group, {})[basis.kind] = None
        for scale in self.scales.values():
            kinds.setdefault(scale.group, {})["positive"] = None
        found = {name: " and ".join(kinds.get(name, ())) or "permutation" for name in self.groups}
        if any(group.kind != found[name] for name, group in self.groups.items()):
            groups = {name: replace(group, kind=found[name]) for name, group in self.groups.items()}
            object.__setattr__(self, "groups", groups)

    @functools.cached_property
    def parents(self) -> dict[str, tuple[str, ...]]:
        """For each group the names of its parents."""
        return {name: group.parents for name, group in self.groups.items()}

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The extent of every name, free or fixed; 0 where a hand-written one is not known yet."""
        return {f.name: f.size for f in self._factors() if f.name is not None}

    @functools.cached_property
    def row_keys(self) -> frozenset[str]:
        """The tensors whose rows no group moves or tells apart, so that each can be moved by itself."""
        moved = {*self.groups, *(parent for group in self.groups.values() for parent in group.parents)}
        return frozenset(
            key
            for key, layout in self.layouts.items()
            if layout
            and not any(isinstance(term, Switch) for term in layout)
            and not any(factor.name in moved for factor in factors(layout[0]))
        )

    def _factors(self) -> Iterator[Factor]:
        return (f for layout in self.layouts.values() for term in layout for f in factors(term))

    def summary(self) -> str:
        """One line: groups, scales, bases of each kind, and the share of hidden units that are free."""
        share = f"{self.num_free} of {self.num_hidden} hidden units free" if self.num_hidden else "hidden units not counted"
        percent = f" ({self.num_free / self.num_hidden:.1%})" if self.num_hidden else ""
        families = sum(bool(g.parents) for g in self.groups.values())
        nested = f", {families} of them nested" if families else ""
        unreached = f"; {len(self.unreached)} parameters never used" if self.unreached else ""
        scales = f", {_count(self.scales, 'positive scale')}" if self.scales else ""
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(basis.kind for basis in self.bases.values()).items())
        bases = f", {len(self.bases)} change{'s' if len(self.bases) > 1 else ''} of basis ({kinds})" if self.bases else ""
        return f"{_count(self.groups, 'group')}{nested}{scales}{bases}; {share}{percent}{unreached}"

    def warn_of_unreached(self) -> None:
        """Warn, at the user's line, if a parameter that no call used is large enough to read or write a group's units."""
        smallest = min((group.size for group in self.groups.values()), default=0)
        exposed = [key for key in self.unreached if any(term.size >= smallest > 0 for term in self.layouts[key])]
        if exposed:
            more = f" and {len(exposed) - 1} more" if len(exposed) > 1 else ""
            warnings.warn(
                f"parameters that no call used ({exposed[0]}{more}) may read or write free units, and then a permutation "
                "changes what they compute: give example inputs of calls that use them, or ignore this if nothing does",
                UnreachedWarning,
                stacklevel=_find_level_of_caller(),
            )

    def check(self) -> None:
        """Refuse a structure that contradicts itself, as hand-written and loaded ones can.

        Raises:
            ValueError: naming the group or the axis.
        """
        found = {f.name for f in self._factors()}
        for name, group in self.groups.items():
            for used in (name, *group.parents):
                if used not in found:
                    raise ValueError(f"{used!r} does not occur in any axis")
            for i, parent in enumerate(group.parents):
                above = self.groups[parent].parents if parent in self.groups else ()
                if not set(above) <= set(group.parents[:i]):
                    raise ValueError(f"{name}[{','.join(group.parents)}] must name the parents of {parent!r} before it")
        for key, layout in self.layouts.items():
            for axis, term in enumerate(layout):
                for parent, siblings in dependencies(term, self.parents):
                    if find_parent(layout, axis, siblings, parent) is None:
                        raise ValueError(
                            f"{key!r}: axis {axis} of {write(layout)!r} depends on {parent!r}, which must stand beside it "
                            "in the same product or in exactly one other axis"
                        )

    def bind(self, model: Model) -> Self:
        """Check that a model or state dict has these tensors in these shapes; learn sizes that are not known yet.

        Returns:
            This symmetry, or a copy with sizes if it was written by hand.

        Raises:
            ValueError: naming the first difference.
        """
        state = read_state(model)
        shapes = state.shapes
        if not all(self.sizes.values()):
            return self._fit(shapes, find_ties(model) if isinstance(model, nn.Module) else ())
        aliases = {key: keys for keys in self.ties for key in keys}
        for key, layout in self.layouts.items():
            if key not in shapes and not any(k in shapes for k in aliases.get(key, ())):
                raise ValueError(f"the state has no {key!r}, which the symmetry expects")
            expected = tuple(t.size for t in layout)
            if key in shapes and tuple(shapes[key].shape) != expected:
                raise ValueError(f"{key!r} has shape {tuple(shapes[key].shape)}, the symmetry expects {expected}")
        for key in shapes:
            if key not in self.layouts:
                raise ValueError(f"the state has {key!r}, which the symmetry does not know")
        check_ties(state, self.ties)
        return self

    def _fit(self, shapes: Mapping[str, Tensor], ties: Ties) -> Self:
        sizes = _learn_sizes(self.layouts, shapes)
        layouts: dict[str, Layout] = {}
        for key, tensor in shapes.items():
            if key in self.layouts:
                layouts[key] = parse(write(self.layouts[key]), sizes)
            else:
                layouts[key] = tuple(Factor(n) for n in tensor.shape)
        groups = {name: replace(group, size=sizes[name]) for name, group in self.groups.items()}
        for keys in ties:
            if len({layouts[k] for k in keys}) > 1:
                raise ValueError(f"{' and '.join(map(repr, keys))} are one tensor; give them the same pattern")
        return replace(self, groups=groups, layouts=layouts, ties=ties)


def _find_level_of_caller() -> int:
    """How many calls above the caller of this function the first one outside of the package is, as warnings count them."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def _learn_sizes(layouts: Mapping[str, Layout], shapes: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes of all names in hand-written layouts, from the shapes of the tensors."""
    sizes: dict[str, int] = {}
    pending = []
    for key, layout in layouts.items():
        if key not in shapes:
            raise ValueError(f"the state has no {key!r}, which the symmetry expects")
        if len(layout) != shapes[key].dim():
            raise ValueError(f"{key!r} has {shapes[key].dim()} axes, its pattern {write(layout)!r} has {len(layout)}")
        pending += [(key, term, n) for term, n in zip(layout, shapes[key].shape, strict=True)]
    while pending:
        left = []
        for key, term, n in pending:
            try:
                if not fit(term, n, sizes):
                    left.append((key, term, n))
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from None
        if len(left) == len(pending):
            raise ValueError(f"the sizes in {write((left[0][1],))!r} of {left[0][0]!r} cannot be told from the shapes")
        pending = left
    return sizes


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
