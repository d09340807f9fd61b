"""Transforms: a permutation of units, and positive scales of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from onebasin.symmetries.scales import ScaledTensors
from onebasin.symmetries.structure import Group, Power, Scale
from onebasin.symmetries.symmetry import Permutation, Symmetry, describe_symmetry, read_element, read_symmetry
from onebasin.tensors.files import save_tensors
from onebasin.tensors.states import LazyState, Model, State, StateDict, read_state


class Transform:
    """One element of a symmetry with scales: units are permuted first, and then multiplied.

    Args:
        permutation: of the units.
        logarithms: of the scales by their names in ``permutation.symmetry.scales``, (*parent sizes, size) each; a scale
            that is not named is one.
    """

    def __init__(self, permutation: Permutation, logarithms: Mapping[str, Tensor]):
        symmetry = permutation.symmetry
        for name, value in logarithms.items():
            if name not in symmetry.scales:
                raise ValueError(f"the symmetry has no scale {name!r}")
            shape = scale_shape(symmetry, symmetry.scales[name])
            if tuple(value.shape) != shape:
                raise ValueError(f"the scale {name!r} has shape {tuple(value.shape)}, expected {shape}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"the scale {name!r} is not finite")
        self.permutation = permutation
        self.logarithms = {name: value.detach().cpu().double() for name, value in logarithms.items()}

    @classmethod
    def random(cls, symmetry: Symmetry, generator: torch.Generator | None = None) -> Transform:
        """A random permutation, and scales within a factor of about three."""
        return cls(symmetry.random(generator), _draw(symmetry, generator))

    @property
    def symmetry(self) -> Symmetry:
        """Whose element it is."""
        return self.permutation.symmetry

    @functools.cached_property
    def _scaled(self) -> ScaledTensors:
        return scaled_tensors(self.symmetry)

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.permutation.is_identity and not any(bool(value.any()) for value in self.logarithms.values())

    def __repr__(self) -> str:
        largest = max((float(value.abs().max()) for value in self.logarithms.values() if value.numel()), default=0.0)
        return f"Transform({self.permutation!r}, {len(self.logarithms)} scales up to e^{largest:.2g})"

    def only(self, group: str) -> Transform:
        """The same for one group; all others stay as they are."""
        mine = {n: v for n, v in self.logarithms.items() if self.symmetry.scales[n].group == group}
        return Transform(self.permutation.only(group), mine)

    @overload
    def apply(self, model: LazyState) -> LazyState: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def apply(self, model: nn.Module | StateDict | dict[str, Any]) -> StateDict: ...  # pyright: ignore
    @overload
    def apply(self, model: Model) -> State: ...
    def apply(self, model: Model) -> State:
        """The transformed state of a model or state dict: a new dict, the input untouched. See `Permutation.apply`."""
        moved = self.permutation.apply(read_state(model))
        return moved.map(lambda key, value: self._scaled.scale(key, value, self.logarithms))

    def __matmul__(self, other: Transform) -> Transform:
        """``(a @ b).apply(m) == a.apply(b.apply(m))``."""
        theirs = self._carry(other.logarithms)
        names = dict.fromkeys((*self.logarithms, *theirs))
        total = {n: sum(d[n] for d in (self.logarithms, theirs) if n in d) for n in names}
        return Transform(self.permutation @ other.permutation, total)  # type: ignore[arg-type]

    def inverse(self) -> Transform:
        """The transform that undoes this one."""
        back = Transform(self.permutation.inverse(), {})
        return Transform(back.permutation, back._carry({name: -value for name, value in self.logarithms.items()}))

    def _carry(self, logarithms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers of units, where the permutation puts them."""
        groups = self.symmetry.groups
        return {name: self._carry_one(groups[self.symmetry.scales[name].group], v) for name, v in logarithms.items()}

    def _carry_one(self, group: Group, value: Tensor) -> Tensor:
        outer = tuple(source.unsqueeze(-1) for source in self.permutation.parent_sources(group))
        return value[(*outer, self.permutation[group.name])]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained safetensors file."""
        scales = [
            [s.name, s.group, {key: [list(p) for p in powers] for key, powers in s.powers.items()}, dict(s.offsets)]
            for s in self.symmetry.scales.values()
        ]
        header = {**describe_symmetry(self.symmetry), "format": "onebasin transform 1", "scales": scales}
        tensors = {f"index:{name}": value for name, value in self.permutation.indices.items()}
        save_tensors(path, {**tensors, **{f"log:{name}": value for name, value in self.logarithms.items()}}, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Transform:
        """Read a transform that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is not a transform.
        """
        return read_element(path, "transform", cls._read)

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Transform:
        parts: dict[str, dict[str, Tensor]] = {"index": {}, "log": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(":")
            parts[kind][rest] = value
        return cls(Permutation(read_symmetry(header, _read_scales(header["scales"])), parts["index"]), parts["log"])


def scaled_tensors(symmetry: Symmetry) -> ScaledTensors:
    """Multiplies the tensors of a symmetry by its scales."""
    return ScaledTensors(symmetry.scales, symmetry.groups, symmetry.layouts, symmetry.sizes)


def _read_scales(entries: list[Any]) -> dict[str, Scale]:
    scales = {}
    for name, group, powers, offsets in entries:
        read = {key: tuple(Power(int(a), int(n), e) for a, n, e in found) for key, found in powers.items()}
        scales[name] = Scale(name, group, read, {key: float(value) for key, value in offsets.items()})
    return scales


def scale_shape(symmetry: Symmetry, scale: Scale) -> tuple[int, ...]:
    """One number for each unit: (*parent sizes, size)."""
    group = symmetry.groups[scale.group]
    return (*(symmetry.sizes[parent] for parent in group.parents), group.size)


def _draw(symmetry: Symmetry, generator: torch.Generator | None) -> dict[str, Tensor]:
    return {
        name: 0.5 * torch.randn(scale_shape(symmetry, scale), generator=generator, dtype=torch.float64)
        for name, scale in symmetry.scales.items()
    }


class ScaledSymmetry:
    """A symmetry whose random elements are transforms, in float64, for verification."""

    def __init__(self, symmetry: Symmetry):
        self.groups, self.ties, self.unreached = symmetry.groups, symmetry.ties, symmetry.unreached
        self._symmetry = symmetry

    def random(self, generator: torch.Generator | None = None) -> _InFloat64:
        """A random permutation with random scales."""
        return _InFloat64(Transform.random(self._symmetry, generator))

    def random_cycles(self, generator: torch.Generator | None = None) -> _InFloat64:
        """A permutation that moves every unit, with random scales."""
        return _InFloat64(Transform(self._symmetry.random_cycles(generator), _draw(self._symmetry, generator)))


@dataclass(frozen=True)
class _InFloat64:
    """A transform that multiplies in float64, whatever the type of the tensors is."""

    transform: Transform

    def apply(self, model: LazyState) -> LazyState:
        return self.transform.apply(model.to(model.device, torch.float64))

    def only(self, group: str) -> _InFloat64:
        return _InFloat64(self.transform.only(group))
