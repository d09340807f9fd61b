"""Transforms: a permutation of units, positive scales of them, and changes of their basis."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args, overload

import torch
from torch import Tensor, nn

from onebasin.symmetries.basis_matrices import MixedTensors, check_matrices, random_reflection
from onebasin.symmetries.moments import Moments
from onebasin.symmetries.multiplication import (
    ROUNDING,
    check_fixed,
    describe_changes,
    draw,
    matrix_shape,
    mixed_tensors,
    scale_shape,
    scaled_tensors,
)
from onebasin.symmetries.optimizers import move_optimizer_state, name_parameters
from onebasin.symmetries.scales import ScaledTensors
from onebasin.symmetries.structure import Basis, BasisKind, Group, Place, Power, Scale
from onebasin.symmetries.symmetry import Permutation, Symmetry, describe_symmetry, read_element, read_symmetry
from onebasin.tensors.files import load_header, save_tensors
from onebasin.tensors.states import LazyState, Model, State, StateDict, read_state


class GroupElement(NamedTuple):
    """What a transform does to the units of one group: they are permuted, then multiplied, then mixed.

    Attributes:
        permutation: the index, see `Permutation`.
        logarithms: of the scales of the group, by name; a scale that is not there is one.
        matrices: of the bases of the group, by name; a basis that is not there stays as it is.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> transform = ob.Transform.random(ob.symmetry(model, torch.zeros(1, 4), kinds="positive"))
    >>> index, logarithms, matrices = transform["0.weight"]
    >>> index.shape, logarithms["0.weight"].shape, matrices
    (torch.Size([8]), torch.Size([8]), {})
    """

    permutation: Tensor
    logarithms: dict[str, Tensor]
    matrices: dict[str, Tensor]


class Transform:
    """One element of a symmetry with scales and bases: units are permuted first, then multiplied, then mixed.

    ``transform[group]`` is a `GroupElement`, what it does to the units of one group.

    Args:
        permutation: of the units.
        logarithms: of the scales by their names in ``permutation.symmetry.scales``, (*parent sizes, size) each; a scale
            that is not named is one.
        matrices: of the bases by their names in ``permutation.symmetry.bases``, (*parent sizes, size, size) each; a basis
            that is not named stays as it is.
        check: refuse numbers of wrong shapes, and matrices that are not of the kind of their bases.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> transform = ob.Transform.random(ob.symmetry(model, x, kinds="positive"))
    >>> moved = transform.apply(model)
    >>> torch.allclose(torch.func.functional_call(model, moved, x), model(x), atol=1e-5)
    True
    >>> torch.allclose(transform.inverse().apply(moved)["0.weight"], model[0].weight, atol=1e-5)
    True
    """

    def __init__(
        self,
        permutation: Permutation,
        logarithms: Mapping[str, Tensor],
        matrices: Mapping[str, Tensor] | None = None,
        check: bool = True,
    ):
        matrices = matrices or {}
        if check:
            self._check(permutation.symmetry, logarithms, matrices)
        self.permutation = permutation
        self.logarithms = {name: value.detach().cpu().double() for name, value in logarithms.items()}
        self.matrices = {name: value.detach().cpu().double() for name, value in matrices.items()}
        self._plans: dict[str, dict[str, Tensor]] = {}

    @staticmethod
    def _check(symmetry: Symmetry, logarithms: Mapping[str, Tensor], matrices: Mapping[str, Tensor]) -> None:
        for name, value in matrices.items():
            if name not in symmetry.bases:
                raise ValueError(f"the symmetry has no basis {name!r}")
            shape = matrix_shape(symmetry, symmetry.bases[name])
            if tuple(value.shape) != shape:
                raise ValueError(f"the matrix of {name!r} has shape {tuple(value.shape)}, expected {shape}")
            check_matrices(symmetry.bases[name], value.detach().cpu().double())
        for name, value in logarithms.items():
            if name not in symmetry.scales:
                raise ValueError(f"the symmetry has no scale {name!r}")
            shape = scale_shape(symmetry, symmetry.scales[name])
            if tuple(value.shape) != shape:
                raise ValueError(f"the scale {name!r} has shape {tuple(value.shape)}, expected {shape}")
            if not bool(value.isfinite().all()):
                raise ValueError(f"the scale {name!r} is not finite")

    @classmethod
    def random(cls, symmetry: Symmetry, generator: torch.Generator | None = None) -> Transform:
        """A random permutation, scales within a factor of about three, and random well-conditioned matrices."""
        return cls(symmetry.random(generator), *draw(symmetry, generator))

    @property
    def symmetry(self) -> Symmetry:
        """Whose element it is."""
        return self.permutation.symmetry

    @functools.cached_property
    def _scaled(self) -> ScaledTensors:
        return scaled_tensors(self.symmetry)

    @functools.cached_property
    def _mixed(self) -> MixedTensors:
        return mixed_tensors(self.symmetry)

    @property
    def is_permutation(self) -> bool:
        """Whether it does nothing but permute units."""
        mixed = any(not self._is_unit(name, matrix) for name, matrix in self.matrices.items())
        return not mixed and not any(bool(value.any()) for value in self.logarithms.values())

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.is_permutation and self.permutation.is_identity

    def _is_unit(self, name: str, matrix: Tensor) -> bool:
        is_signs = self.symmetry.bases[name].kind == "signed"
        unit = torch.ones_like(matrix) if is_signs else torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix)
        return torch.equal(matrix, unit)

    def __repr__(self) -> str:
        largest = max((float(value.abs().max()) for value in self.logarithms.values() if value.numel()), default=0.0)
        mixed = f", {len(self.matrices)} changes of basis" if self.matrices else ""
        return f"Transform({self.permutation!r}, {len(self.logarithms)} scales up to e^{largest:.2g}{mixed})"

    def __getitem__(self, group: str) -> GroupElement:
        """What is done to the units of a group. Pairs of units of a rotary basis are no group: see `matrices`."""
        return GroupElement(
            self.permutation[group],
            {n: v for n, v in self.logarithms.items() if self.symmetry.scales[n].group == group},
            {n: v for n, v in self.matrices.items() if self.symmetry.bases[n].group == group},
        )

    def only(self, group: str) -> Transform:
        """The same for one group; all others stay as they are."""
        _, logarithms, matrices = self[group]
        return Transform(self.permutation.only(group), logarithms, matrices, check=False)

    @overload
    def apply(self, model: LazyState) -> LazyState: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def apply(self, model: nn.Module | StateDict | dict[str, Any]) -> StateDict: ...  # pyright: ignore
    @overload
    def apply(self, model: Model) -> State: ...
    def apply(self, model: Model) -> State:
        """The transformed state of a model or state dict: a new dict, the input untouched. See `Permutation.apply`."""
        state = read_state(model)
        if self.matrices:
            check_fixed(self.symmetry, state)
        moved = self.permutation.apply(state)
        return moved.map(self.multiply)

    def apply_difference(self, difference: Model) -> State:
        """The difference of two states after both are transformed: a task vector, for example. It may lack tensors.

        Raises:
            ValueError: for a tensor that the symmetry does not know, or for a gain that is not the same in both states, so
                that one of them is not in canonical form.
        """
        state = read_state(difference)
        self._check_difference(state)
        return state.map(self._move_difference)

    def _move_difference(self, key: str, value: Tensor) -> Tensor:
        return self.multiply(key, self.permutation.move_tensor(key, value), is_difference=True)

    def _check_difference(self, state: State) -> None:
        layouts = self.symmetry.layouts
        for key, value in state.shapes.items():
            expected = tuple(term.size for term in layouts[key]) if key in layouts else None
            if expected != tuple(value.shape):
                known = "does not know it" if expected is None else f"expects {expected}"
                raise ValueError(f"{key!r} has shape {tuple(value.shape)}, the symmetry {known}")
        for key in self.symmetry.fixed if self.matrices else ():
            if key in state and bool(state[key].any()):
                raise ValueError(
                    f"{key!r} differs between the two states, and a change of basis needs it to be the same: take the "
                    "difference of their canonical forms (onebasin.canonical, or the command onebasin canonical)"
                )

    def apply_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
        """See `Permutation.apply_optimizer`. Moments follow where the next step is then the transformed step.

        All optimisers follow permutations, and those of PyTorch changes of sign. SGD with momentum follows rotations too, as
        far as no gain of a norm is trained along the units that are rotated.

        Raises:
            ValueError: likewise; and if a moment cannot follow: under positive scales, maps that change lengths, and, for
                optimisers that work entry by entry, rotations.
        """
        self.symmetry.bind(model)
        return self.move_optimizer(optimizer.state_dict(), name_parameters(optimizer, model))

    def move_optimizer(self, saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """The same for a state dict of an optimiser, with the names of its parameters in its order."""
        logarithms = {name: value for name, value in self.logarithms.items() if bool(value.any())}
        matrices = {name: value for name, value in self.matrices.items() if not self._is_unit(name, value)}
        multiply = Transform(self.permutation, {}, matrices, check=False).multiply
        moments = Moments(self.symmetry, logarithms, matrices, self.permutation.move_tensor, multiply)
        moments.check_trained(names)
        return move_optimizer_state(saved, names, self.symmetry.layouts, moments.move)

    def move(self, key: str, value: Tensor) -> Tensor:
        """One tensor of a state, by its key; the tensor itself if nothing in it changes."""
        return self.multiply(key, self.permutation.move(value, self.symmetry.layouts[key]))

    @functools.cached_property
    def _bases_of(self) -> dict[str, list[str]]:
        """The bases that enter each tensor."""
        found: dict[str, list[str]] = {}
        for name in self.matrices:
            for key in self.symmetry.bases[name].places:
                found.setdefault(key, []).append(name)
        return found

    def multiply(self, key: str, value: Tensor, is_difference: bool = False) -> Tensor:
        """One tensor of a state whose units are permuted already: multiplied by scales, and in the new bases."""
        value = self._scaled.scale(key, value, self.logarithms, is_difference)
        plans: dict[str, Tensor] = {}
        for name in self._bases_of.get(key, ()):
            if name not in self._plans:  # the dual of a basis is made when a tensor needs it
                self._plans[name] = self._mixed.make_plans({name: self.matrices[name]})
            plans |= {each: plan.to(value.device) for each, plan in self._plans[name].items()}
        return self._mixed.mix_with({key: value}, plans)[key] if plans else value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Permutation):
            return self.is_permutation and self.permutation == other
        if not isinstance(other, Transform):
            return NotImplemented
        if self.permutation != other.permutation:
            return False
        own, theirs = self._effects(), other._effects()
        return own.keys() == theirs.keys() and all(
            own[name][0] == theirs[name][0] and torch.equal(own[name][1], theirs[name][1]) for name in own
        )

    __hash__ = None  # type: ignore[assignment]

    def _effects(self) -> dict[tuple[str, str], tuple[Scale | Basis, Tensor]]:
        """The scales and matrices that change something, each with what it is in the symmetry."""
        scales, bases = self.symmetry.scales, self.symmetry.bases
        scaled = {("scale", n): (scales[n], value) for n, value in self.logarithms.items() if bool(value.any())}
        mixed = {("basis", n): (bases[n], value) for n, value in self.matrices.items() if not self._is_unit(n, value)}
        return {**scaled, **mixed}

    def __rmatmul__(self, other: Permutation) -> Transform:
        return self._convert(other) @ self if isinstance(other, Permutation) else NotImplemented

    def _convert(self, permutation: Permutation) -> Transform:
        """A permutation as a transform of this symmetry.

        Raises:
            ValueError: if its groups differ.
        """
        self.permutation._check_same_groups(permutation)
        return Transform(Permutation(self.symmetry, permutation.indices, check=False), {}, check=False)

    def __matmul__(self, other: Transform | Permutation) -> Transform:
        """``(a @ b).apply(m) == a.apply(b.apply(m))``; a permutation is a transform without scales and matrices."""
        if isinstance(other, Permutation):
            other = self._convert(other)
        if not isinstance(other, Transform):
            return NotImplemented
        self.permutation._check_same_groups(other.permutation)
        theirs = self._carry(other.logarithms)
        names = dict.fromkeys((*self.logarithms, *theirs))
        total = {n: sum(d[n] for d in (self.logarithms, theirs) if n in d) for n in names}
        matrices = self._carry_matrices(other.matrices)
        for name, matrix in self.matrices.items():
            if name in matrices:
                is_signs = self.symmetry.bases[name].kind == "signed"
                matrix = matrix * matrices[name] if is_signs else matrix @ matrices[name]
            matrices[name] = matrix
        return Transform(self.permutation @ other.permutation, total, matrices, check=False)  # type: ignore[arg-type]

    def inverse(self) -> Transform:
        """The transform that undoes this one."""
        back = Transform(self.permutation.inverse(), {})
        logarithms = back._carry({name: -value for name, value in self.logarithms.items()})
        signed = {name for name, basis in self.symmetry.bases.items() if basis.kind == "signed"}
        inverted = {n: value if n in signed else torch.linalg.inv(value) for n, value in self.matrices.items()}
        matrices = back._carry_matrices(inverted)
        return Transform(back.permutation, logarithms, matrices, check=False)

    def _carry(self, logarithms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Numbers of units, where the permutation puts them."""
        groups = self.symmetry.groups
        return {name: self._carry_one(groups[self.symmetry.scales[name].group], v) for name, v in logarithms.items()}

    def _carry_one(self, group: Group, value: Tensor) -> Tensor:
        outer = tuple(source.unsqueeze(-1) for source in self.permutation.parent_sources(group))
        return value[(*outer, self.permutation[group.name])]

    def _carry_matrices(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, for numbers of pairs of units."""
        carried = {}
        for name, value in matrices.items():
            basis = self.symmetry.bases[name]
            group = Group(basis.group, value.shape[-1], basis.parents)
            if basis.kind == "signed":
                carried[name] = self._carry_one(group, value)
                continue
            index = torch.arange(group.size) if basis.is_rotary else self.permutation[group.name]
            outer = tuple(source[..., None, None] for source in self.permutation.parent_sources(group))
            carried[name] = value[(*outer, index.unsqueeze(-1), index.unsqueeze(-2))]
        return carried

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained safetensors file."""
        scales = [
            [s.name, s.group, {key: [list(p) for p in powers] for key, powers in s.powers.items()}, dict(s.offsets)]
            for s in self.symmetry.scales.values()
        ]
        bases = [
            [b.name, b.group, b.kind, {key: [list(p) for p in places] for key, places in b.places.items()}, list(b.parents)]
            for b in self.symmetry.bases.values()
        ]
        header = {**describe_symmetry(self.symmetry), "format": "onebasin transform 1", "scales": scales}
        header |= {"bases": bases, "fixed": dict(self.symmetry.fixed)}
        tensors = {f"index:{name}": value for name, value in self.permutation.indices.items()}
        tensors |= {f"log:{name}": value for name, value in self.logarithms.items()}
        save_tensors(path, tensors | {f"matrix:{name}": value for name, value in self.matrices.items()}, header)

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
        parts: dict[str, dict[str, Tensor]] = {"index": {}, "log": {}, "matrix": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(":")
            parts[kind][rest] = value
        symmetry = read_symmetry(
            header,
            scales=_read_scales(header["scales"]),
            bases=_read_bases(header.get("bases", ()), {name: parents for name, _, parents in header["groups"]}),
            fixed={key: float(value) for key, value in header.get("fixed", {}).items()},
        )
        return cls(Permutation(symmetry, parts["index"]), parts["log"], parts["matrix"])


def load_element(path: str | os.PathLike[str]) -> Permutation | Transform:
    """Read what `Permutation.save` or `Transform.save` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, or is something else.
    """
    found = load_header(path).get("format")
    if found == "onebasin transform 1":
        return Transform.load(path)
    if found != "onebasin permutation 1":
        raise ValueError(f"{path} is neither a onebasin permutation nor a onebasin transform (format {repr(found)[:60]})")
    return Permutation.load(path)


def _read_scales(entries: list[Any]) -> dict[str, Scale]:
    scales = {}
    for name, group, powers, offsets in entries:
        read = {key: tuple(Power(int(a), int(n), e) for a, n, e in found) for key, found in powers.items()}
        scales[name] = Scale(name, group, read, {key: float(value) for key, value in offsets.items()})
    return scales


def _read_bases(entries: Iterable[Any], parents: Mapping[str, Sequence[str]]) -> dict[str, Basis]:
    bases = {}
    for name, group, kind, places, *more in entries:  # files of earlier versions do not repeat the parents of the group
        if kind not in get_args(BasisKind):
            raise ValueError(f"no basis has the kind {kind!r}")
        read = {key: tuple(Place(int(a), int(n), bool(d)) for a, n, d in found) for key, found in places.items()}
        bases[name] = Basis(name, group, kind, read, tuple(more[0] if more else parents[group]))
    return bases


_DENSE_SIZE = 256
"""Of the largest groups that are rotated by random matrices for verification. Larger ones are reflected along one random
vector: reflections generate all rotations, so a function that no random reflection changes is changed by no rotation."""


class TransformedSymmetry:
    """A symmetry whose random elements are transforms, in float64, for verification."""

    def __init__(self, symmetry: Symmetry):
        self.groups, self.ties, self.unreached = symmetry.groups, symmetry.ties, symmetry.unreached
        self.fixed, self.rounding = symmetry.fixed, ROUNDING if symmetry.bases else 0.0
        self.change = describe_changes(symmetry, "permuting")
        self._symmetry = symmetry
        self._reflected = {
            name: basis
            for name, basis in symmetry.bases.items()
            if basis.kind in ("orthogonal", "centred") and not basis.parents and symmetry.sizes[basis.group] > _DENSE_SIZE
        }
        kept = {name: basis for name, basis in symmetry.bases.items() if name not in self._reflected}
        self._drawn = replace(symmetry, bases=kept)

    def random(self, generator: torch.Generator | None = None) -> _InFloat64:
        """A random permutation with random scales, matrices and reflections."""
        return self._complete(self._symmetry.random(generator), generator)

    def random_cycles(self, generator: torch.Generator | None = None) -> _InFloat64:
        """A permutation that moves every unit, with random scales, matrices and reflections."""
        return self._complete(self._symmetry.random_cycles(generator), generator)

    def _complete(self, permutation: Permutation, generator: torch.Generator | None) -> _InFloat64:
        transform = Transform(permutation, *draw(self._drawn, generator), check=False)
        sizes = self._symmetry.sizes
        vectors = {n: random_reflection(sizes[b.group], b.kind, generator) for n, b in self._reflected.items()}
        return _InFloat64(transform, mixed_tensors(self._symmetry), vectors)


@dataclass(frozen=True)
class _InFloat64:
    """A transform that multiplies in float64, whatever the type of the tensors is, and reflections after it."""

    transform: Transform
    mixed: MixedTensors
    vectors: Mapping[str, Tensor]

    def apply(self, model: LazyState) -> LazyState:
        moved = self.transform.permutation.apply(model).to(model.device, torch.float64)
        return moved.map(lambda key, value: self.mixed.reflect(key, self.transform.multiply(key, value), self.vectors))

    def only(self, group: str) -> _InFloat64:
        bases = self.transform.symmetry.bases
        mine = {name: vector for name, vector in self.vectors.items() if bases[name].group == group}
        return _InFloat64(self.transform.only(group), self.mixed, mine)
