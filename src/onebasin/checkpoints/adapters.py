"""Low-rank adapters (LoRA), moved along with the model that they belong to."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from onebasin.checkpoints.kohya_names import is_kohya, translate_names
from onebasin.symmetries import Permutation, Place, Power, Symmetry, Transform
from onebasin.symmetries.indices import dependencies, find_parent
from onebasin.symmetries.layout import Factor, Layout
from onebasin.tensors.states import LazyState

_Entry = TypeVar("_Entry", Power, Place)

_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)


def move_adapter(permutation: Permutation | Transform, adapter: LazyState, transposed: bool = False) -> LazyState:
    """A LoRA (in PEFT's or kohya's names) for the permuted or transformed model: with it, W + B A is changed as W is.

    A is changed along the base weight's input axis, B along its output axis; the rank axis stays. A magnitude vector (DoRA)
    follows permutations of the output axis. A bias, or a module that was trained as a whole, changes as the model's own
    tensor does. In a file with LoRAs of several networks, in kohya's names, those of the others stay as they are.

    Args:
        permutation: of the base model.
        adapter: the tensors of the LoRA. For a transform with changes of basis, of a model in canonical form.
        transposed: base weights are (inputs, outputs), as in GPT-2 (``fan_in_fan_out`` in PEFT's configuration).

    Raises:
        ValueError: for a tensor that belongs to nothing in the model, whose axis moves differently for every unit of the
            other axis, so that the permuted product has no low-rank form, or whose gain is not as changes of basis need it;
            for magnitudes of a weight that is scaled or mixed.

    >>> import torch
    >>> import onebasin as ob
    >>> from onebasin.checkpoints import move_adapter
    >>> from onebasin.tensors import LazyState
    >>> state = {"fc1.weight": torch.randn(3, 2), "fc2.weight": torch.randn(2, 3)}
    >>> symmetry = ob.Symmetry.from_axes({"fc1.weight": "h i", "fc2.weight": "o h"}, ["h"], state)
    >>> lora = {"fc1.lora_A.weight": torch.randn(1, 2), "fc1.lora_B.weight": torch.randn(3, 1)}
    >>> turn = ob.Permutation(symmetry, {"h": torch.tensor([1, 2, 0])})
    >>> moved = move_adapter(turn, LazyState(lora, lora.__getitem__))
    >>> torch.equal(moved["fc1.lora_B.weight"], lora["fc1.lora_B.weight"][[1, 2, 0]])
    True
    """
    shapes = adapter.shapes
    names = translate_names(permutation.symmetry, shapes).names if is_kohya(shapes) else {key: key for key in shapes}
    parts = {key: _find_part(permutation.symmetry, name, shapes[key], transposed) for key, name in names.items()}
    if isinstance(permutation, Permutation):
        layouts = {key: part.layout for key, part in parts.items()}
        return adapter.map(functools.partial(_move_part, permutation, layouts))
    for key, part in parts.items():
        if part.is_magnitude and is_multiplied(permutation, part.key):
            raise ValueError(f"{key!r} is a magnitude (DoRA) of a weight that is scaled or mixed, which it cannot follow")
    extended = _extend(permutation.symmetry, parts)
    for key, number in extended.fixed.items() if permutation.matrices else ():
        if key in parts and not bool((adapter[key] == number).all()):
            raise ValueError(
                f"{key!r} is a gain and must be filled with {number:g} for a change of basis: an adapter that has trained a "
                "gain cannot follow. Merge it into its base, and move the canonical form of that"
            )
    moved = Permutation(extended, permutation.permutation.indices, check=False)
    whole = Transform(moved, permutation.logarithms, permutation.matrices)
    return adapter.map(functools.partial(_transform_part, whole, frozenset(parts)))


def _move_part(permutation: Permutation, layouts: Mapping[str, Layout], key: str, value: Tensor) -> Tensor:
    return permutation.move(value, layouts[key]) if key in layouts else value


def _transform_part(transform: Transform, keys: frozenset[str], key: str, value: Tensor) -> Tensor:
    return transform.move(key, value) if key in keys else value


def is_adapter(names: Iterable[str]) -> bool:
    """Whether some of these are names of a LoRA's tensors."""
    names = list(names)
    return is_kohya(names) or any(_LORA.fullmatch(name) for name in names)


@dataclass(frozen=True)
class _Part:
    """A tensor of an adapter.

    Attributes:
        key: the tensor of the model that it belongs to.
        axes: for each axis of the part the axis of that tensor that it follows; None for the rank.
        layout: of the part.
        is_magnitude: whether it is the norms of rows (DoRA).
    """

    key: str
    axes: tuple[int | None, ...]
    layout: Layout
    is_magnitude: bool = False


def _find_part(symmetry: Symmetry, key: str, value: Tensor, transposed: bool) -> _Part:
    match = _LORA.fullmatch(key)
    if match is None:
        plain = re.sub(r"^base_model\.model\.|\.base_layer|\.modules_to_save(\.default)?", "", key)
        if plain not in symmetry.layouts:
            raise ValueError(f"{key!r} is not part of a LoRA, nor of the model that the permutation belongs to")
        layout = symmetry.layouts[plain]
        return _Part(plain, tuple(range(len(layout))), _check_shape(key, value, layout))
    weight = f"{match['module']}.weight"
    if weight not in symmetry.layouts:
        raise ValueError(f"{key!r} belongs to {weight!r}, which the permutation does not know")
    layout, part = symmetry.layouts[weight], match["part"]
    embedding = part.startswith("lora_embedding")
    output, inputs = (1, 0) if embedding or transposed else (0, 1)
    if len(layout) < 2:
        raise ValueError(f"{key!r} belongs to {weight!r}, which has {len(layout)} axes and not two")
    if part.endswith("_A"):
        axes: tuple[int | None, ...] = (None, inputs, *range(2, len(layout)))
    else:
        axes = (output, *(None for _ in value.shape[1:]))
    check_independent(symmetry, weight, inputs if part.endswith("_A") else output)
    extents = zip(axes, value.shape, strict=False)
    found = tuple(Factor(extent) if axis is None else layout[axis] for axis, extent in extents)
    return _Part(weight, axes, _check_shape(key, value, found), part == "lora_magnitude_vector")


def check_independent(symmetry: Symmetry, key: str, axis: int) -> None:
    """Refuse an axis of a tensor's layout that depends on another axis: what lies along it alone cannot follow."""
    layout, parents = symmetry.layouts[key], {basis.group: basis.parents for basis in symmetry.bases.values()}
    for parent, siblings in dependencies(layout[axis], parents | symmetry.parents):
        if find_parent(layout, axis, siblings, parent) != axis:
            raise ValueError(f"axis {axis} of {key!r} moves differently for every {parent!r}: it cannot be followed")


def is_multiplied(transform: Transform, key: str) -> bool:
    """Whether a tensor is multiplied by a scale or a matrix."""
    scales, bases = transform.symmetry.scales, transform.symmetry.bases
    scaled = any(key in scales[name].powers for name in transform.logarithms)
    return scaled or any(key in bases[name].places for name in transform.matrices)


def _extend(symmetry: Symmetry, parts: Mapping[str, _Part]) -> Symmetry:
    """The same symmetry of the model together with the parts of an adapter, which change as their tensors do."""

    def follow(entries: Mapping[str, tuple[_Entry, ...]]) -> dict[str, tuple[_Entry, ...]]:
        found = dict(entries)
        for key, part in parts.items():
            numbers = {place: axis for axis, place in enumerate(part.axes)}
            own = [entry._replace(axis=numbers[entry.axis]) for entry in entries.get(part.key, ()) if entry.axis in numbers]
            found |= {key: tuple(own)} if own else {}
        return found

    def rename(numbers: Mapping[str, float]) -> dict[str, float]:
        whole = {key: part.key for key, part in parts.items() if part.key in numbers and None not in part.axes}
        return {**numbers, **{key: numbers[name] for key, name in whole.items()}}

    scales, bases = symmetry.scales.values(), symmetry.bases.values()
    return replace(
        symmetry,
        layouts={**symmetry.layouts, **{key: part.layout for key, part in parts.items()}},
        scales={each.name: replace(each, powers=follow(each.powers), offsets=rename(each.offsets)) for each in scales},
        bases={each.name: replace(each, places=follow(each.places)) for each in bases},
        fixed=rename(symmetry.fixed),
    )


def _check_shape(key: str, value: Tensor, layout: Layout) -> Layout:
    expected = tuple(term.size for term in layout)
    if tuple(value.shape) != expected:
        raise ValueError(f"{key!r} has shape {tuple(value.shape)}, the permutation expects {expected}")
    return layout
