"""Symmetry as a value: which axes of which tensors may be permuted together."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onebasin.symmetries.layout import (
    Factor,
    Layout,
    dependencies,
    factors,
    find_parent,
    fit,
    parse,
    write,
)
from onebasin.tensors.lazy import LazyState
from onebasin.tensors.states import check_ties, find_ties, read_state

if TYPE_CHECKING:
    from onebasin.symmetries.permutation import Permutation


@dataclass(frozen=True)
class Group:
    """Units that are permuted together, everywhere they occur.

    Attributes:
        name: stable, from the parameter that makes the units.
        size: number of units.
        parents: a group without parents is one permutation; with parents it is a family, one permutation for each
            combination of the parents' elements (the units of each head). A parent may be a fixed extent.
    """

    name: str
    size: int
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pin:
    """Why an axis is not free: the operation, and the module it runs in."""

    reason: str
    operation: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.reason} ({self.operation}{where})" if self.operation else self.reason


@dataclass(frozen=True)
class Site:
    """Where groups live in the activations: the output of a module, at its `call`-th use, with this layout.

    A recurrent layer returns several tensors: the first one is meant.
    """

    module: str
    call: int
    layout: Layout


@dataclass(frozen=True)
class Symmetry:
    """Which axes of which tensors can be permuted together without changing the function.

    Attributes:
        groups: the free groups by name.
        layouts: for every state key, one term an axis.
        ties: state keys that are one tensor.
        pinned: why an axis (key, axis) has parts that are not free.
        unreached: parameters that the example calls never used; they are left alone.
        sites: for each group, the activations it lives in.
        num_hidden: hidden units: output channels of weight operations that are not model outputs.
        num_free: how many of those can move.
    """

    groups: Mapping[str, Group]
    layouts: Mapping[str, Layout]
    ties: tuple[tuple[str, ...], ...] = ()
    pinned: Mapping[tuple[str, int], Pin] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    sites: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)
    num_hidden: int = 0
    num_free: int = 0

    @classmethod
    def from_axes(
        cls, axes: Mapping[str, str], free: Iterable[str], model: nn.Module | Mapping[str, Any] | None = None
    ) -> Symmetry:
        """A symmetry written by hand, for a model that cannot be traced. Prove it with `verify`.

        Args:
            axes: for each state key a pattern, such as ``"h i"`` or ``"o (h 49)"``; keys not named are left alone.
            free: the names that may be permuted; ``"d[h]"`` is a family, one permutation of d for each h.
            model: gives the sizes. Without it the symmetry learns them from the first model it meets.

        >>> Symmetry.from_axes({"fc1.weight": "h i", "fc2.weight": "o (h 49)"}, free=["h"]).groups["h"].parents
        ()
        """
        layouts = {key: parse(pattern) for key, pattern in axes.items()}
        groups = {}
        for entry in free:
            match = re.fullmatch(r"\s*([^\s()+\[\],]+)\s*(?:\[([^\[\]]*)\])?\s*", entry)
            if not match or match[1].isdigit():
                raise ValueError(f"cannot read the free name {entry!r}: write 'h', or 'd[h]' for a family of h")
            parents = tuple(p.strip() for p in (match[2] or "").split(",") if p.strip())
            groups[match[1]] = Group(match[1], 0, parents)
        symmetry = cls(groups, layouts)
        symmetry.check()
        return symmetry if model is None else symmetry.bind(model)

    def check(self) -> None:
        """Refuse a symmetry that does not hang together: our own can not fail this, hand-written and loaded ones can."""
        found = {f.name for layout in self.layouts.values() for term in layout for f in factors(term)}
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

    @functools.cached_property
    def parents(self) -> dict[str, tuple[str, ...]]:
        """For each group the names of its parents."""
        return {name: group.parents for name, group in self.groups.items()}

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The extent of every name, free or fixed; 0 where a hand-written one is not known yet."""
        leaves = (f for layout in self.layouts.values() for term in layout for f in factors(term))
        return {f.name: f.size for f in leaves if f.name is not None}

    @functools.cached_property
    def still(self) -> dict[str, Tensor]:
        """For each group the index that moves nothing: shared, and not to be written to."""
        return self.identity().indices

    def bind(self, model: nn.Module | Mapping[str, Any]) -> Symmetry:
        """Check that a model or state dict has these tensors in these shapes; learn sizes that are not known yet.

        Returns:
            This symmetry, or a copy with sizes if it was written by hand.

        Raises:
            ValueError: naming the first difference.
        """
        state = model.shapes if isinstance(model, LazyState) else read_state(model)
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if not all(self.sizes.values()):
            ties = find_ties(model) if isinstance(model, nn.Module) else ()
            return self._fit(tensors, ties)
        alias = {key: keys for keys in self.ties for key in keys}
        for key, layout in self.layouts.items():
            if key not in tensors and not any(k in tensors for k in alias.get(key, ())):
                raise ValueError(f"the state has no {key!r}, which the symmetry expects")
            shape = tuple(t.size for t in layout)
            if key in tensors and tuple(tensors[key].shape) != shape:
                raise ValueError(f"{key!r} has shape {tuple(tensors[key].shape)}, the symmetry expects {shape}")
        for key in tensors:
            if key not in self.layouts:
                raise ValueError(f"the state has {key!r}, which the symmetry does not know")
        check_ties(model if isinstance(model, LazyState) else tensors, self.ties)
        return self

    def _fit(self, tensors: Mapping[str, Tensor], ties: tuple[tuple[str, ...], ...]) -> Symmetry:
        sizes: dict[str, int] = {}
        pending = []
        for key, layout in self.layouts.items():
            if key not in tensors:
                raise ValueError(f"the state has no {key!r}, which the symmetry expects")
            if len(layout) != tensors[key].dim():
                raise ValueError(f"{key!r} has {tensors[key].dim()} axes, its pattern {write(layout)!r} has {len(layout)}")
            pending += [(key, term, n) for term, n in zip(layout, tensors[key].shape, strict=True)]
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
        layouts: dict[str, Layout] = {}
        for key, tensor in tensors.items():
            if key in self.layouts:
                layouts[key] = parse(write(self.layouts[key]), sizes)
            else:
                layouts[key] = tuple(Factor(n) for n in tensor.shape)
        groups = {name: replace(group, size=sizes[name]) for name, group in self.groups.items()}
        for keys in ties:
            if len({layouts[k] for k in keys}) > 1:
                raise ValueError(f"{' and '.join(map(repr, keys))} are one tensor; give them the same pattern")
        return replace(self, groups=groups, layouts=layouts, ties=ties)

    def restrict(self, groups: Iterable[str] | str | None) -> Symmetry:
        """Only the groups whose names match one of these shell patterns: the others stay as they are. None: all.

        Raises:
            ValueError: if there are patterns, and no group matches any.
        """
        if groups is None:
            return self
        patterns = [groups] if isinstance(groups, str) else list(groups)
        kept = {name: g for name, g in self.groups.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
        if patterns and not kept:
            raise ValueError(f"no group matches {patterns}; there are {', '.join(self.groups)}")
        return replace(self, groups=kept)

    def verify(self, model: nn.Module, example_inputs: Any, tolerance: float = 1e-9) -> float:
        """Check on this model's own weights that random permutations leave its function alone, in float64.

        Returns:
            The largest relative difference seen.

        Raises:
            ValueError: naming the group to blame.
        """
        from onebasin.symmetries.verification import verify  # stands below: it makes symmetries

        return verify(self, model, example_inputs, tolerance=tolerance)

    def summary(self) -> str:
        """One line: groups, and the share of hidden units that are free."""
        share = f"{self.num_free} of {self.num_hidden} hidden units free" if self.num_hidden else "hidden units not counted"
        percent = f" ({self.num_free / self.num_hidden:.1%})" if self.num_hidden else ""
        families = sum(bool(g.parents) for g in self.groups.values())
        nested = f", {families} of them nested" if families else ""
        unreached = f"; {len(self.unreached)} parameters never used" if self.unreached else ""
        return f"{len(self.groups)} groups{nested}; {share}{percent}{unreached}"

    def __str__(self) -> str:
        from onebasin.symmetries.describe import describe

        return describe(self)

    def _permutation(self, make: Callable[[tuple[int, ...]], Tensor]) -> Permutation:
        from onebasin.symmetries.permutation import Permutation  # stands below: a permutation is of a symmetry

        sizes = self.sizes
        if not all(sizes.values()):
            unknown = ", ".join(sorted(name for name, size in sizes.items() if not size))
            raise ValueError(f"the sizes of {unknown} are not known yet: bind the symmetry to a model first")
        return Permutation.trusted(
            self,
            {name: make((*(sizes[p] for p in g.parents), g.size)) for name, g in self.groups.items()},
        )

    def identity(self) -> Permutation:
        """The permutation that moves nothing."""
        return self._permutation(lambda shape: torch.arange(shape[-1]).expand(shape).contiguous())

    def random(self, generator: torch.Generator | None = None) -> Permutation:
        """A uniformly random permutation."""
        return self._permutation(lambda shape: torch.rand(shape, generator=generator).argsort(dim=-1))
