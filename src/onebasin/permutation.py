"""Symmetry and Permutation as values: what may be permuted, and one way of doing it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.files import load_tensors, save_tensors
from onebasin.gather import gather
from onebasin.layout import (
    Factor,
    Layout,
    dependencies,
    factors,
    find_parent,
    fit,
    gather_indices,
    parse,
    write,
)
from onebasin.state import State, check_ties, find_ties, read_state


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
    """Where groups live in the activations: the output of a module, at its `call`-th use, with this layout."""

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
        symmetry._check()
        return symmetry if model is None else symmetry.bind(model)

    def _check(self) -> None:
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

    @property
    def parents(self) -> dict[str, tuple[str, ...]]:
        """For each group the names of its parents."""
        return {name: group.parents for name, group in self.groups.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The extent of every name, free or fixed; 0 where a hand-written one is not known yet."""
        leaves = (f for layout in self.layouts.values() for term in layout for f in factors(term))
        return {f.name: f.size for f in leaves if f.name is not None}

    def bind(self, model: nn.Module | Mapping[str, Any]) -> Symmetry:
        """Check that a model or state dict has these tensors in these shapes; learn sizes that are not known yet.

        Returns:
            This symmetry, or a copy with sizes if it was written by hand.

        Raises:
            ValueError: naming the first difference.
        """
        state = read_state(model)
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
        check_ties(tensors, self.ties)
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

    def verify(self, model: nn.Module, example_inputs: Any, tolerance: float = 1e-9) -> float:
        """Check on this model's own weights that random permutations leave its function alone, in float64.

        Returns:
            The largest relative difference seen.

        Raises:
            ValueError: naming the group to blame.
        """
        from onebasin.tracing.verification import verify  # tracing stands above this file

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
        from onebasin.table import describe

        return describe(self)

    def _permutation(self, make: Callable[[tuple[int, ...]], Tensor]) -> Permutation:
        sizes = self.sizes
        if not all(sizes.values()):
            unknown = ", ".join(sorted(name for name, size in sizes.items() if not size))
            raise ValueError(f"the sizes of {unknown} are not known yet: bind the symmetry to a model first")
        return Permutation(
            self,
            {name: make((*(sizes[p] for p in g.parents), g.size)) for name, g in self.groups.items()},
        )

    def identity(self) -> Permutation:
        """The permutation that moves nothing."""
        return self._permutation(lambda shape: torch.arange(shape[-1]).expand(shape).contiguous())

    def random(self, generator: torch.Generator | None = None) -> Permutation:
        """A uniformly random permutation."""
        return self._permutation(lambda shape: torch.rand(shape, generator=generator).argsort(dim=-1))


class Permutation:
    """One element of a symmetry: an index tensor for each group, (*parent sizes, size).

    ``new[h, d] = old[s[h], p[h][d]]``: inner permutations are indexed by the target's parent.
    """

    def __init__(self, symmetry: Symmetry, indices: Mapping[str, Tensor]):
        sizes = symmetry.sizes
        for name, group in symmetry.groups.items():
            if name not in indices:
                raise ValueError(f"there is no index for the group {name!r}")
            shape = (*(sizes[p] for p in group.parents), group.size)
            index = indices[name]
            if tuple(index.shape) != shape:
                raise ValueError(f"the index of {name!r} has shape {tuple(index.shape)}, expected {shape}")
            if not torch.equal(index.sort(dim=-1).values, torch.arange(group.size, device=index.device).expand(shape)):
                raise ValueError(f"the index of {name!r} is not a permutation of 0 ... {group.size - 1}")
        for name in indices:
            if name not in symmetry.groups:
                raise ValueError(f"the symmetry has no group {name!r}")
        self.symmetry = symmetry
        self.indices = {name: indices[name].detach().cpu().long() for name in symmetry.groups}

    def __getitem__(self, group: str) -> Tensor:
        return self.indices[group]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation) or self.symmetry.groups != other.symmetry.groups:
            return False
        return all(torch.equal(self[name], other[name]) for name in self.indices)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        moved = sum(int((index != torch.arange(index.shape[-1])).sum()) for index in self.indices.values())
        return f"Permutation({len(self.indices)} groups, {moved} of {self.num_units} units moved)"

    @property
    def num_units(self) -> int:
        """Entries of all the indices."""
        return sum(index.numel() for index in self.indices.values())

    def agreement(self, other: Permutation) -> float:
        """Share of entries that are equal, 1 for equal permutations."""
        self._check_same_groups(other)
        equal = sum(int((self[name] == other[name]).sum()) for name in self.indices)
        return equal / self.num_units if self.num_units else 1.0

    def _check_same_groups(self, other: Permutation) -> None:
        if self.symmetry.groups != other.symmetry.groups:
            raise ValueError("the two permutations belong to different symmetries: their groups differ")

    def _parent_sources(self, group: Group) -> tuple[Tensor, ...]:
        """For every combination of target parents of a group, the source parents."""
        sizes = self.symmetry.sizes
        shape = [sizes[p] for p in group.parents]
        grid = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij") if shape else ()
        target = dict(zip(group.parents, grid, strict=True))
        return tuple(
            self[p][(*(target[q] for q in self.symmetry.groups[p].parents), target[p])] if p in self.indices else target[p]
            for p in group.parents
        )

    def __matmul__(self, other: Permutation) -> Permutation:
        """``(a @ b).apply(m) == a.apply(b.apply(m))``."""
        self._check_same_groups(other)
        indices = {}
        for name, group in self.symmetry.groups.items():
            outer = tuple(s.unsqueeze(-1) for s in self._parent_sources(group))
            indices[name] = other[name][(*outer, self[name])]
        return Permutation(self.symmetry, indices)

    def inverse(self) -> Permutation:
        """The permutation that undoes this one."""
        indices = {}
        for name, group in self.symmetry.groups.items():
            back = torch.empty_like(self[name])
            back[self._parent_sources(group) or ...] = self[name].argsort(dim=-1)
            indices[name] = back
        return Permutation(self.symmetry, indices)

    def apply(self, model: nn.Module | Mapping[str, Any]) -> State:
        """The permuted state of a model or state dict: a new dict, the input untouched.

        Tensors that do not move are the input's own, not copies. Tied keys stay one tensor.
        """
        state = read_state(model)
        self.symmetry.bind(state)
        done: dict[int, Tensor] = {}
        result = dict(state)
        representative = {k: keys[0] for keys in self.symmetry.ties for k in keys}
        tied: dict[str, Tensor] = {}
        for key, layout in self.symmetry.layouts.items():
            if key not in state:
                continue
            first = representative.get(key, key)
            value = tied.get(first, state[key])
            tied[first] = value
            if id(value) not in done:
                done[id(value)] = self._gather(value, layout)
            result[key] = done[id(value)]
        return result

    def _gather(self, value: Tensor, layout: Layout) -> Tensor:
        return gather(value, gather_indices(layout, self.indices, self.symmetry.parents))

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
        """The optimiser's state dict with every moment moved along with its parameter, for ``load_state_dict``.

        Raises:
            ValueError: for a parameter that is not the model's, or a state whose shape is not its parameter's (factored
                second moments): it cannot be told how that would move.
        """
        self.symmetry.bind(model)
        keys = {id(p): key for key, p in model.named_parameters()}
        saved = optimizer.state_dict()
        moved: dict[int, dict[str, Any]] = {}
        for live, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(live["params"], packed["params"], strict=True):
                if id(parameter) not in keys:
                    raise ValueError("the optimiser holds a parameter that is not one of the model's")
                key = keys[id(parameter)]
                entries = saved["state"].get(number, {})
                moved[number] = {
                    what: self._move_moment(key, what, parameter, value) for what, value in entries.items()
                }
        return {**saved, "state": {number: entries for number, entries in moved.items() if entries}}

    def _move_moment(self, key: str, what: str, parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:
            return value.clone()  # load_state_dict would share it, and both optimisers would count its steps
        if value.shape != parameter.shape:
            raise ValueError(
                f"the optimiser's {what!r} of {key!r} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: "
                "factored states cannot be permuted"
            )
        moved = self._gather(value, self.symmetry.layouts[key])
        return value.clone() if moved is value else moved

    def plans(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """This permutation as plans for `gather.mix`: zeros and ones, rows of the target, columns of the source.

        For a child, pairs of parents that do not meet have weight zero; they get the identity.
        """
        plans = {}
        for name, group in self.symmetry.groups.items():
            sizes = [self.symmetry.sizes[p] for p in group.parents]
            shape = [n for p, n in zip(group.parents, sizes, strict=True) for _ in range(1 + (p in self.indices))]
            plan = torch.eye(group.size, dtype=dtype).expand(*shape, -1, -1).contiguous()
            grid = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij") if sizes else ()
            sources = self._parent_sources(group)
            where = [
                index
                for p, t, s in zip(group.parents, grid, sources, strict=True)
                for index in ((t, s) if p in self.indices else (t,))
            ]
            plan[tuple(where) or ...] = torch.eye(group.size, dtype=dtype)[self[name]]
            plans[name] = plan
        return plans

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained safetensors file: names, shapes, layouts and ties beside the indices."""
        header = {
            "format": "onebasin permutation 1",
            "groups": [[g.name, g.size, list(g.parents)] for g in self.symmetry.groups.values()],
            "sizes": self.symmetry.sizes,
            "layouts": {key: write(layout) for key, layout in self.symmetry.layouts.items()},
            "ties": [list(keys) for keys in self.symmetry.ties],
        }
        save_tensors(path, self.indices, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Permutation:
        """Read a permutation that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is not a permutation.
        """
        tensors, header = load_tensors(path)
        if header.get("format") != "onebasin permutation 1":
            raise ValueError(f"{path} is not a onebasin permutation (format {header.get('format')!r})")
        try:
            groups = {name: Group(name, size, tuple(parents)) for name, size, parents in header["groups"]}
            layouts = {key: parse(text, header["sizes"]) for key, text in header["layouts"].items()}
            symmetry = Symmetry(groups, layouts, tuple(tuple(keys) for keys in header["ties"]))
            symmetry._check()
            return cls(symmetry, tensors)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a onebasin permutation: {error}") from error
