"""Changes of basis: what makes units is multiplied by a matrix, and what reads them by its inverse transpose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from onebasin.symmetries.layout import Factor, Layout, Product, Sum, Switch, Term, factors
from onebasin.symmetries.layout import names as layout_names
from onebasin.symmetries.mixing import mix_all
from onebasin.symmetries.scales import ScaledTensors
from onebasin.symmetries.structure import Basis, BasisKind, Group, Power, Scale
from onebasin.symmetries.unrolling import Block, roll, unroll


class MixedTensors:
    """Multiplies tensors by the matrices of bases.

    Args:
        bases: by name.
        layouts: of the tensors.
    """

    def __init__(self, bases: Mapping[str, Basis], layouts: Mapping[str, Layout]):
        self._layouts: dict[str, Layout] = {}
        self._parents: dict[str, tuple[str, ...]] = {}
        self._kinds = {name: basis.kind for name, basis in bases.items()}
        signed = {name: basis for name, basis in bases.items() if basis.kind == "signed"}
        sizes = {f.name: f.size for layout in layouts.values() for term in layout for f in factors(term) if f.name}
        self._signs = ScaledTensors(
            {name: _as_scale(basis) for name, basis in signed.items()},
            {basis.group: Group(basis.group, sizes[basis.group], basis.parents) for basis in signed.values()},
            layouts,
            sizes,
        )
        for basis in (basis for name, basis in bases.items() if name not in signed):
            for is_dual in (False, True):
                self._parents[_name(basis.name, is_dual)] = basis.parents
            for key, places in basis.places.items():
                terms = list(self._layouts.get(key, layouts[key]))
                for axis in {place.axis for place in places}:
                    new = {p.number: _name(basis.name, p.is_dual) for p in places if p.axis == axis}
                    names = (new.get(number, basis.group) for number in itertools.count())
                    # Factors of the group that another basis has renamed are counted too.
                    terms[axis] = _rename(layouts[key][axis], terms[axis], basis.group, names)
                self._layouts[key] = tuple(terms)

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors that some basis changes."""
        return tuple(dict.fromkeys((*self._layouts, *self._signs.keys)))

    def mix(self, tensors: Mapping[str, Tensor], matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors in the new bases; differentiable in the matrices. A tensor that no basis enters is returned as it is.

        Args:
            tensors: by state key.
            matrices: for each basis the matrices, (*parent sizes, size, size); of signs their diagonals.
        """
        return {**tensors, **self.mix_with(tensors, self.make_plans(matrices))}

    def make_plans(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Matrices by the names of their bases, and their duals, as `mix_with` takes them."""
        plans = {}
        for name, matrix in matrices.items():
            if _name(name, False) in self._parents:
                is_rotation = self._kinds[name] in ("orthogonal", "centred")
                plans |= pair(name, matrix, matrix if is_rotation else torch.linalg.inv(matrix).mT)
            else:
                plans[name] = matrix
        return plans

    def mix_with(self, tensors: Mapping[str, Tensor], plans: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that some basis changes, by matrices and their duals as `pair` makes them, and by signs."""
        flipped = {key: self._signs.flip(key, tensors[key], plans) for key in self._signs.keys if key in tensors}
        plans = {name: plan for name, plan in plans.items() if name in self._parents}
        entered = {key: flipped.get(key, value) for key, value in tensors.items() if key in self._layouts}
        kind = next((plan.dtype for plan in plans.values()), torch.float32)
        wide = {key: value.to(torch.promote_types(value.dtype, kind)) for key, value in entered.items()}
        parents = {name: self._parents[name] for name in plans}
        mixed = mix_all(wide, self._layouts, plans, parents)
        return flipped | {key: mixed[key].to(value.dtype) for key, value in entered.items()}

    def reflect(self, key: str, tensor: Tensor, vectors: Mapping[str, Tensor]) -> Tensor:
        """A tensor with the units of some bases reflected: each is multiplied by 1 - 2 v v^T, for a unit vector v.

        No matrix is built, so that units by the thousand are mixed in the time of a few copies of the tensor.

        Args:
            key: of the tensor.
            tensor: in any basis.
            vectors: (size,) for some bases of groups without parents.
        """
        labels = {_name(name, is_dual): vector for name, vector in vectors.items() for is_dual in (False, True)}
        if key not in self._layouts or not labels.keys() & layout_names(self._layouts[key]):
            return tensor
        blocks = (_reflect_block(block, labels) for block in unroll(self._layouts[key], labels, tensor))
        return roll(self._layouts[key], labels, blocks)

    def parities(self, key: str) -> dict[str, Tensor]:
        """For each basis of signs that enters a tensor how often it multiplies each entry, in a shape to broadcast."""
        return self._signs.exponents(key)

    def unfold(self, key: str, tensor: Tensor, basis: str, is_dual: bool) -> Iterator[Tensor]:
        """The parts of a tensor that a matrix of a basis, or its dual, multiplies: (*parent sizes, size, all else) each."""
        label = _name(basis, is_dual)
        parents = self._parents[label]
        for block in unroll(self._layouts[key], {label, *parents}, tensor):
            for axis in (number for number, name in enumerate(block.labels) if name == label):
                front = [*block.parent_axes(axis, parents), axis]
                rest = [number for number in range(len(block.labels)) if number not in front]
                yield block.tensors[0].permute(*front, *rest).reshape(*(block.sizes[a] for a in front), -1)


def _reflect_block(block: Block, vectors: Mapping[str, Tensor]) -> Tensor:
    (tensor,) = block.tensors
    for axis, label in enumerate(block.labels):
        if label is not None and label in vectors:
            vector = vectors[label].to(tensor)
            part = (tensor.movedim(axis, -1) @ vector).unsqueeze(axis)
            along = vector.view([-1 if each == axis else 1 for each in range(tensor.dim())])
            tensor = torch.addcmul(tensor, part, along, value=-2)
    return tensor


def _as_scale(basis: Basis) -> Scale:
    """A basis of signs as a scale, which is spread over tensors alike."""
    powers = {key: tuple(Power(p.axis, p.number, 1) for p in places) for key, places in basis.places.items()}
    return Scale(basis.name, basis.group, powers)


def pair(name: str, matrix: Tensor, dual: Tensor) -> dict[str, Tensor]:
    """A matrix and its dual as `MixedTensors.mix_with` takes them, where the dual is known without an inverse."""
    return {_name(name, False): matrix, _name(name, True): dual}


def _name(basis: str, is_dual: bool) -> str:
    return f"{'dual' if is_dual else 'basis'}:{basis}"


def _rename(original: Term, term: Term, group: str, names: Iterator[str]) -> Term:
    """A term whose factors of a group have other names; `original` is the term before any was renamed."""
    match original, term:
        case Factor(), Factor():
            if original.name != group:
                return term
            name = next(names)
            return term if name == group else Factor(term.size, name)
        case (Product(old), Product(new)) | (Sum(old), Sum(new)) | (Switch(old), Switch(new)):
            parts = tuple(_rename(a, b, group, names) for a, b in zip(old, new, strict=True))
            return type(term)(parts)  # type: ignore[call-arg]
    raise AssertionError("renaming keeps the structure of a term")


def random_matrices(shape: Iterable[int], kind: BasisKind, generator: torch.Generator | None) -> Tensor:
    """Random, well-conditioned matrices of a kind, in float64; of signs their diagonals."""
    shape = tuple(shape)
    if kind == "signed":
        return 1.0 - 2.0 * torch.randint(0, 2, shape, generator=generator).double()
    size = shape[-1]
    first, second = (torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    if kind == "linear":
        stretch = (0.3 * torch.randn(shape[:-1], generator=generator, dtype=torch.float64)).exp()
        return first @ (stretch.unsqueeze(-1) * second)
    if kind == "rotary":
        angle, stretch = (torch.randn(shape[:-2], generator=generator, dtype=torch.float64) for _ in range(2))
        return turn(3 * angle, (0.3 * stretch).exp())
    if kind == "orthogonal" or size == 1:
        return first if size > 1 else torch.ones(shape, dtype=torch.float64)
    inner = torch.linalg.qr(torch.randn((*shape[:-2], size - 1, size - 1), generator=generator, dtype=torch.float64)).Q
    rest = complement_of_ones(size)
    return rest @ inner @ rest.mT + torch.full((size, size), 1 / size, dtype=torch.float64)


def random_reflection(size: int, kind: BasisKind, generator: torch.Generator | None) -> Tensor:
    """A random unit vector v, in float64, for which 1 - 2 v v^T is a rotation of a kind."""
    vector = torch.randn(size, generator=generator, dtype=torch.float64)
    vector = vector - vector.mean() if kind == "centred" else vector
    return vector / vector.norm()


def turn(angle: Tensor, stretch: Tensor) -> Tensor:
    """Rotations of two units by an angle, times a number."""
    cos, sin = stretch * angle.cos(), stretch * angle.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def complement_of_ones(size: int) -> Tensor:
    """An orthonormal basis of the vectors that sum to zero, as columns, in float64."""
    vectors = torch.eye(size, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors).Q[:, 1:]


def check_matrices(basis: Basis, matrices: Tensor, tolerance: float = 1e-6) -> None:
    """Refuse matrices that are not of the kind of a basis.

    Raises:
        ValueError: saying what is wrong.
    """
    if not bool(matrices.isfinite().all()):
        raise ValueError(f"the matrix of {basis.name!r} is not finite")
    if basis.kind == "signed":
        if not bool((matrices.abs() == 1).all()):
            raise ValueError(f"the signs of {basis.name!r} are not 1 and -1")
        return
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    if basis.kind == "rotary":
        cos, sin = (matrices[..., 0, 0] + matrices[..., 1, 1]) / 2, (matrices[..., 1, 0] - matrices[..., 0, 1]) / 2
        stretch = torch.hypot(cos, sin)
        apart = (turn(torch.atan2(sin, cos), stretch) - matrices).abs().amax((-2, -1))
        if not bool(((stretch > 0) & (apart <= tolerance * stretch)).all()):
            raise ValueError(f"a matrix of {basis.name!r} is not a rotation times a positive number")
        return
    if basis.kind != "linear" and not torch.allclose(matrices @ matrices.mT, identity.expand_as(matrices), atol=tolerance):
        raise ValueError(f"the matrix of {basis.name!r} is not orthogonal")
    if basis.kind == "centred" and not torch.allclose(matrices.sum(-1), torch.ones(()).to(matrices), atol=tolerance):
        raise ValueError(f"the matrix of {basis.name!r} does not keep the vector of ones")
    if basis.kind == "linear" and not float(torch.linalg.cond(matrices).max()) <= 1e8:  # of zeros it is not a number
        raise ValueError(f"the matrix of {basis.name!r} is singular, or close to it")
