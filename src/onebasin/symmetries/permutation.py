"""Permutation as a value: one element of a symmetry, to apply, invert, compose, save."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from onebasin.symmetries.gather import gather
from onebasin.symmetries.layout import Cache, Layout, gather_indices, parse, write
from onebasin.symmetries.structure import Group, Symmetry
from onebasin.tensors.files import load_tensors, save_tensors
from onebasin.tensors.lazy import LazyState
from onebasin.tensors.states import State, read_state


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
            identity = torch.arange(group.size, device=index.device).expand(shape)
            if not torch.equal(index, identity) and not torch.equal(index.sort(dim=-1).values, identity):
                raise ValueError(f"the index of {name!r} is not a permutation of 0 ... {group.size - 1}")
        for name in indices:
            if name not in symmetry.groups:
                raise ValueError(f"the symmetry has no group {name!r}")
        self.symmetry = symmetry
        self.indices = {name: indices[name].detach().cpu().long() for name in symmetry.groups}
        self._cache: Cache = {}

    @classmethod
    def trusted(cls, symmetry: Symmetry, indices: dict[str, Tensor]) -> Permutation:
        """Of indices on the CPU that are known to be permutations, and need no check."""
        made = object.__new__(cls)
        made.symmetry, made.indices, made._cache = symmetry, indices, {}
        return made

    @functools.cached_property
    def _moving(self) -> dict[str, Tensor]:
        """A tensor whose groups all stay is not copied, and one of which a single axis moves is moved in whole rows."""
        still = self.symmetry.still
        return {n: index for n, index in self.indices.items() if index is not still[n] and not torch.equal(index, still[n])}

    def __getitem__(self, group: str) -> Tensor:
        return self.indices[group]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Permutation) or self.symmetry.groups != other.symmetry.groups:
            return False
        return all(torch.equal(self[name], other[name]) for name in self.indices)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        moved = sum(int((index != _identity_like(index)).sum()) for index in self._moving.values())
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
        indices = {name: other[name] for name in self.symmetry.groups}
        for name, group in self.symmetry.groups.items():
            if not self._moving.keys().isdisjoint((name, *group.parents)):
                outer = tuple(s.unsqueeze(-1) for s in self._parent_sources(group))
                indices[name] = other[name][(*outer, self[name])]
        return Permutation.trusted(self.symmetry, indices)

    def inverse(self) -> Permutation:
        """The permutation that undoes this one."""
        indices = {}
        for name, group in self.symmetry.groups.items():
            back = torch.empty_like(self[name])
            back[self._parent_sources(group) or ...] = self[name].argsort(dim=-1)
            indices[name] = back
        return Permutation(self.symmetry, indices)

    @property
    def is_identity(self) -> bool:
        """Whether it moves nothing."""
        return not self._moving

    @overload
    def apply(self, model: LazyState) -> LazyState: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def apply(self, model: nn.Module | Mapping[str, Any]) -> State: ...
    def apply(self, model: nn.Module | Mapping[str, Any]) -> State | LazyState:
        """The permuted state of a model or state dict: a new dict, the input untouched.

        Tensors that do not move are the input's own, not copies. Tied keys stay one tensor. Of a lazy state the result is
        lazy: each tensor is permuted when it is read.
        """
        if isinstance(model, LazyState):
            self.symmetry.bind(model)
            return model.map(lambda key, value: self.move(value, self.symmetry.layouts[key]))
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
            value = tied.setdefault(first, state[key])
            if id(value) not in done:
                done[id(value)] = self.move(value, layout)
            result[key] = done[id(value)]
        return result

    def move(self, value: Tensor, layout: Layout) -> Tensor:
        """One tensor of a given layout, permuted; the tensor itself if nothing in it moves."""
        return gather(value, gather_indices(layout, self._moving, self.symmetry.parents, value.device, self._cache))

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
                moved[number] = {what: self._move_moment(key, what, parameter, value) for what, value in entries.items()}
        return {**saved, "state": {number: entries for number, entries in moved.items() if entries}}

    def _move_moment(self, key: str, what: str, parameter: Tensor, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:
            return value.clone()  # load_state_dict would share it, and both optimisers would count its steps
        if value.shape != parameter.shape:
            raise ValueError(
                f"the optimiser's {what!r} of {key!r} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(parameter.shape)}: factored states cannot be permuted"
            )
        moved = self.move(value, self.symmetry.layouts[key])
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
            symmetry.check()
            return cls(symmetry, tensors)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a onebasin permutation: {error}") from error


def _identity_like(index: Tensor) -> Tensor:
    return torch.arange(index.shape[-1], device=index.device).expand(index.shape)
