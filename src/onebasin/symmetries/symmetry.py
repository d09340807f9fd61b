"""Symmetry and Permutation as values: a group of permutations, and one element of it to apply, invert, compose, save."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from onebasin.symmetries.describe import describe, describe_in_html
from onebasin.symmetries.file_checks import check_loaded, check_sizes
from onebasin.symmetries.gather import Block, fill, gather
from onebasin.symmetries.indices import Cache, gather_indices
from onebasin.symmetries.layout import Layout, parse, write
from onebasin.symmetries.multiplication import UnpermutedSymmetry, check_fixed
from onebasin.symmetries.optimizers import move_optimizer_state, name_parameters
from onebasin.symmetries.structure import Group, Structure
from onebasin.symmetries.verification import verify
from onebasin.tensors.files import load_tensors, save_tensors
from onebasin.tensors.states import LazyState, Model, State, StateDict, read_state


class Symmetry(Structure):
    """Which axes of which tensors can be permuted together without changing the function.

    Made by `onebasin.symmetry` from a module, or by `from_axes` by hand. Printed, it is a table.

    Attributes:
        groups: the free groups by name.
        layouts: for every state key, one term per axis.
        ties: state keys that are one tensor.
        pinned: why an axis (key, axis) has parts that are not free.
        unreached: parameters that the example calls never used; they are left alone.
        unread: axes (key, axis) of other parameters of which the example calls read a part only, and why the rest stays
            where it is.
        sites: for each group, the activations it lives in.
        num_hidden: hidden units: output channels of weight operations that are not model outputs.
        num_free: how many of those can move.
        is_traced: whether it was found by tracing, which verifies it, or written by hand.
        front_ends: what made the program of each call and, if it was exported, why it was not recorded.
        limits: what could not be traced, in words.
        scales: positive scales of units by name, if they were asked for.
        bases: changes of basis of units by name, if they were asked for.
        fixed: parameters that are filled with one number, and have to be for changes of basis: the gains of norms.
        gains: vectors that units are multiplied by entry by entry, such as the weights of layer norms, each with the number
            at which it multiplies by one: 1, or 0 for norms that multiply by 1 + weight. None if units are multiplied by
            another function of it.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> symmetry = ob.symmetry(model, torch.zeros(1, 4))
    >>> symmetry.groups["0.weight"].size
    8
    >>> sorted(symmetry.pinned)
    [('0.weight', 1), ('2.bias', 0), ('2.weight', 0)]
    >>> symmetry.random().apply(model)["0.weight"].shape
    torch.Size([8, 4])
    """

    @classmethod
    def from_axes(cls, axes: Mapping[str, str], free: Iterable[str], model: Model | None = None) -> Symmetry:
        """A symmetry written by hand, for a model that cannot be traced. Prove it with `verify`.

        Args:
            axes: for each state key a pattern, such as ``"h i"`` or ``"o (h 49)"``; keys not named are left alone.
            free: the names that may be permuted; ``"d[h]"`` is a family, one permutation of d for each h.
            model: gives the sizes. Without it the symmetry learns them from the first model it meets.

        >>> import onebasin as ob
        >>> ob.Symmetry.from_axes({"fc1.weight": "h i", "fc2.weight": "o (h 49)"}, free=["h"]).groups["h"].parents
        ()
        """
        layouts = {key: parse(pattern) for key, pattern in axes.items()}
        groups = {}
        for entry in free:
            match = re.fullmatch(r"\s*([^\s()+|\[\],]+)\s*(?:\[([^\[\]]*)\])?\s*", entry)
            if not match or match[1].isdigit():
                raise ValueError(f"cannot read the free name {entry!r}: write 'h', or 'd[h]' for a family of h")
            parents = tuple(p.strip() for p in (match[2] or "").split(",") if p.strip())
            groups[match[1]] = Group(match[1], 0, parents)
        symmetry = cls(groups, layouts)
        symmetry.check()
        return symmetry if model is None else symmetry.bind(model)

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
        scales = {name: scale for name, scale in self.scales.items() if scale.group in kept}
        bases = {
            name: basis
            for name, basis in self.bases.items()
            if (
                basis.group in kept
                if basis.group in self.groups
                else any(fnmatch.fnmatchcase(basis.group, p) for p in patterns)
            )
        }
        return replace(self, groups=kept, scales=scales, bases=bases)

    def verify(self, model: nn.Module, example_inputs: Any, tolerance: float = 1e-9) -> float:
        """Check on this model's own weights that random permutations leave its function alone, in float64.

        If there are scales or changes of basis, random ones of those are checked too.

        Returns:
            The largest relative difference seen.

        Raises:
            ValueError: naming the group to blame; or a gain that has to be folded for changes of basis.
        """
        symmetry = self.bind(model)
        if symmetry.bases:
            check_fixed(symmetry, read_state(model))
        worst = verify(symmetry, model, example_inputs, tolerance)
        if symmetry.scales or symmetry.bases:
            worst = max(worst, verify(UnpermutedSymmetry(symmetry), model, example_inputs, tolerance))
        return worst

    @property
    def rounding(self) -> float:
        """What permutations may change beyond the rounding of sums in another order: nothing."""
        return 0.0

    @property
    def change(self) -> str:
        """What its permutations do, for messages of `verify`."""
        return "permuting"

    def __repr__(self) -> str:
        return f"Symmetry({self.summary()})"

    def __str__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        return describe_in_html(self)

    def identity(self) -> Permutation:
        """The permutation that moves nothing."""
        return self._make(lambda shape: torch.arange(shape[-1]).expand(shape).contiguous())

    def random(self, generator: torch.Generator | None = None) -> Permutation:
        """A uniformly random permutation, also if there are scales and bases: `Transform.random` draws those too."""
        return self._make(lambda shape: torch.rand(shape, generator=generator).argsort(dim=-1))

    def random_cycles(self, generator: torch.Generator | None = None) -> Permutation:
        """A random permutation that moves every unit: each group, or member of a family, in a single cycle."""

        def draw(shape: tuple[int, ...]) -> Tensor:
            order = torch.rand(shape, generator=generator).argsort(dim=-1)
            return torch.empty_like(order).scatter_(-1, order, order.roll(1, -1))

        return self._make(draw)

    def _make(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Permutation:
        sizes = self.sizes
        if not all(sizes.values()):
            unknown = ", ".join(sorted(name for name, size in sizes.items() if not size))
            raise ValueError(f"the sizes of {unknown} are not known yet: bind the symmetry to a model first")
        indices = {name: draw((*(sizes[p] for p in g.parents), g.size)) for name, g in self.groups.items()}
        return Permutation(self, indices, check=False)

    @functools.cached_property
    def identity_indices(self) -> dict[str, Tensor]:
        """For each group the index that moves nothing: shared, and not to be written to."""
        return self.identity().indices


class Permutation:
    """One element of a symmetry: an index tensor for each group, (*parent sizes, size).

    ``new[h, d] = old[s[h], p[h][d]]``: inner permutations are indexed by the target's parent.

    Args:
        symmetry: whose groups are permuted.
        indices: for each group, its index.
        check: refuse what is not a permutation. False for indices that are known to be permutations, on the CPU.

    >>> import torch
    >>> import onebasin as ob
    >>> state = {"fc1.weight": torch.arange(6.0).view(3, 2), "fc2.weight": torch.ones(2, 3)}
    >>> symmetry = ob.Symmetry.from_axes({"fc1.weight": "h i", "fc2.weight": "o h"}, ["h"], state)
    >>> turn = ob.Permutation(symmetry, {"h": torch.tensor([1, 2, 0])})
    >>> turn.apply(state)["fc1.weight"].tolist()
    [[2.0, 3.0], [4.0, 5.0], [0.0, 1.0]]
    >>> turn @ turn == turn.inverse()
    True
    """

    def __init__(self, symmetry: Symmetry, indices: Mapping[str, Tensor], check: bool = True):
        if check:
            _check_indices(symmetry, indices)
            indices = {name: indices[name].detach().cpu().long() for name in symmetry.groups}
        self.symmetry = symmetry
        self.indices = dict(indices)
        self._cache: Cache = {}

    @functools.cached_property
    def _moving(self) -> dict[str, Tensor]:
        """A tensor whose groups all stay is not copied, and one of which a single axis moves is moved in whole rows."""
        identity = self.symmetry.identity_indices
        return {
            name: index
            for name, index in self.indices.items()
            if index is not identity[name] and not torch.equal(index, identity[name])
        }

    def __getitem__(self, group: str) -> Tensor:
        return self.indices[group]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation):
            return NotImplemented
        if self.symmetry.groups != other.symmetry.groups:
            return False
        return all(torch.equal(self[name], other[name]) for name in self.indices)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        moved = sum(int((index != torch.arange(index.shape[-1])).sum()) for index in self._moving.values())
        return f"Permutation({len(self.indices)} groups, {moved} of {self.num_units} units moved)"

    @property
    def num_units(self) -> int:
        """Entries of all the indices."""
        return sum(index.numel() for index in self.indices.values())

    @property
    def is_identity(self) -> bool:
        """Whether it moves nothing."""
        return not self._moving

    def agreement(self, other: Permutation) -> float:
        """Share of entries that are equal, 1 for equal permutations."""
        self._check_same_groups(other)
        equal = sum(int((self[name] == other[name]).sum()) for name in self.indices)
        return equal / self.num_units if self.num_units else 1.0

    def only(self, group: str) -> Permutation:
        """The same permutation of one group; all others stay as they are."""
        return Permutation(self.symmetry, {**self.symmetry.identity_indices, group: self[group]}, check=False)

    def _check_same_groups(self, other: Permutation) -> None:
        if self.symmetry.groups != other.symmetry.groups:
            raise ValueError("the two permutations belong to different symmetries: their groups differ")

    def parent_sources(self, group: Group) -> tuple[Tensor, ...]:
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
        """``(a @ b).apply(m) == a.apply(b.apply(m))``; with a `Transform` the result is one too."""
        if not isinstance(other, Permutation):
            return NotImplemented
        self._check_same_groups(other)
        indices = {name: other[name] for name in self.symmetry.groups}
        for name, group in self.symmetry.groups.items():
            if not self._moving.keys().isdisjoint((name, *group.parents)):
                outer = tuple(s.unsqueeze(-1) for s in self.parent_sources(group))
                indices[name] = other[name][(*outer, self[name])]
        return Permutation(self.symmetry, indices, check=False)

    def inverse(self) -> Permutation:
        """The permutation that undoes this one."""
        indices = {}
        for name, group in self.symmetry.groups.items():
            back = torch.empty_like(self[name])
            back[self.parent_sources(group) or ...] = self[name].argsort(dim=-1)
            indices[name] = back
        return Permutation(self.symmetry, indices, check=False)

    @overload
    def apply(self, model: LazyState) -> LazyState: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def apply(self, model: nn.Module | StateDict | dict[str, Any]) -> StateDict: ...  # pyright: ignore
    @overload
    def apply(self, model: Model) -> State: ...
    def apply(self, model: Model) -> State:
        """The permuted state of a model or state dict: a new dict, the input untouched.

        Tensors that do not move are the input's own, not copies. Tied keys stay one tensor. Of a lazy state the result is
        lazy: each tensor is permuted when it is read.

        Warns:
            UnreachedWarning: if a parameter that no call used may read or write free units.
        """
        state = read_state(model)
        if not self.is_identity:
            self.symmetry.warn_of_unreached()
        self.symmetry.bind(state)
        state = state.tie(self.symmetry.ties)
        if state.is_lazy:
            return state.map(self.move_tensor, by_rows=self.symmetry.row_keys)
        later: list[Block] = []
        moved = state.map(lambda key, value: self.move(value, self.symmetry.layouts[key], later))
        fill(later)
        return moved

    def move(self, value: Tensor, layout: Layout, later: list[Block] | None = None) -> Tensor:
        """One tensor of a given layout, permuted; the tensor itself if nothing in it moves. `later`: see `gather`."""
        indices = gather_indices(layout, self._moving, self.symmetry.parents, value.device, self._cache)
        return gather(value, indices, later)

    def move_tensor(self, key: str, value: Tensor) -> Tensor:
        """One tensor of a state, by its key; the tensor itself if nothing in it moves."""
        return self.move(value, self.symmetry.layouts[key])

    def __getstate__(self) -> dict[str, Any]:
        return {"symmetry": self.symmetry, "indices": self.indices, "_cache": {}}

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
        """The optimiser's state dict with every moment moved along with its parameter, for ``load_state_dict``.

        Raises:
            ValueError: for a parameter that is not the model's, or a state whose shape is not its parameter's (factored
                second moments): it cannot be told how that would move.
        """
        self.symmetry.bind(model)
        return self.move_optimizer(optimizer.state_dict(), name_parameters(optimizer, model))

    def move_optimizer(self, saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The same for a state dict of an optimiser, with the names of its parameters in its order."""
        return move_optimizer_state(saved, names, self.symmetry.layouts, lambda _, key, value: self.move_tensor(key, value))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained safetensors file: names, shapes, layouts and ties beside the indices."""
        header = {"format": "onebasin permutation 1", **describe_symmetry(self.symmetry)}
        save_tensors(path, self.indices, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Permutation:
        """Read a permutation that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is not a permutation.
        """
        return read_element(path, "permutation", lambda tensors, header: cls(read_symmetry(header), tensors))


_Element = TypeVar("_Element")


def read_element(
    path: str | os.PathLike[str], what: str, read: Callable[[dict[str, Tensor], dict[str, Any]], _Element]
) -> _Element:
    """Read a file of the format "onebasin `what` 1".

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, or is something else.
    """
    tensors, header = load_tensors(path)
    if header.get("format") != f"onebasin {what} 1":
        raise ValueError(f"{path} is not a onebasin {what} (format {repr(header.get('format'))[:60]})")
    try:
        return read(tensors, header)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a onebasin {what}, or it is damaged: {str(error)[:300]}") from error


def describe_symmetry(symmetry: Symmetry) -> dict[str, Any]:
    """What a file needs to say about a symmetry: names, sizes, layouts and ties."""
    return {
        "groups": [[g.name, g.size, list(g.parents)] for g in symmetry.groups.values()],
        "sizes": symmetry.sizes,
        "layouts": {key: write(layout) for key, layout in symmetry.layouts.items()},
        "ties": [list(keys) for keys in symmetry.ties],
        "unreached": list(symmetry.unreached),
    }


def read_symmetry(header: Mapping[str, Any], **more: Any) -> Symmetry:
    """The symmetry that `describe_symmetry` described, with more attributes.

    Raises:
        ValueError: if it contradicts itself.
    """
    sizes = check_sizes(header["sizes"])
    groups = {name: Group(name, size, tuple(parents)) for name, size, parents in header["groups"]}
    layouts = {key: parse(text, sizes) for key, text in header["layouts"].items()}
    ties, unreached = tuple(tuple(keys) for keys in header["ties"]), tuple(map(str, header.get("unreached", ())))
    if not set(unreached) <= layouts.keys():
        raise ValueError("a parameter that no call used has no layout")
    symmetry = Symmetry(groups, layouts, ties, unreached=unreached, **more)
    check_loaded(symmetry, sizes)
    symmetry.check()
    return symmetry


def _check_indices(symmetry: Symmetry, indices: Mapping[str, Tensor]) -> None:
    for name, group in symmetry.groups.items():
        if name not in indices:
            raise ValueError(f"there is no index for the group {name!r}")
        shape = (*(symmetry.sizes[p] for p in group.parents), group.size)
        index = indices[name]
        if tuple(index.shape) != shape:
            raise ValueError(f"the index of {name!r} has shape {tuple(index.shape)}, expected {shape}")
        identity = torch.arange(group.size, device=index.device).expand(shape)
        if not torch.equal(index, identity) and not torch.equal(index.sort(dim=-1).values, identity):
            raise ValueError(f"the index of {name!r} is not a permutation of 0 ... {group.size - 1}")
    for name in indices:
        if name not in symmetry.groups:
            raise ValueError(f"the symmetry has no group {name!r}")
