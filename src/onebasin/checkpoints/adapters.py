"""Low-rank adapters (LoRA), moved along with the model that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from onebasin.symmetries import Permutation
from onebasin.symmetries.indices import dependencies, find_parent
from onebasin.symmetries.layout import Factor, Layout, Term
from onebasin.tensors.states import LazyState

_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)


def move_adapter(permutation: Permutation, adapter: LazyState, transposed: bool = False) -> LazyState:
    """A LoRA (in PEFT's names) for the permuted model: with it, W + B A is permuted as W is.

    A is permuted along the base weight's input axis, B along its output axis; the rank axis stays. A magnitude vector (DoRA)
    follows the output axis. A bias, or a module that was trained as a whole, moves as the model's own tensor does.

    Args:
        permutation: of the base model.
        adapter: the tensors of the LoRA.
        transposed: base weights are (inputs, outputs), as in GPT-2 (``fan_in_fan_out`` in PEFT's configuration).

    Raises:
        ValueError: for a tensor that belongs to nothing in the model, or whose axis moves differently for every unit of the
            other axis, so that the permuted product has no low-rank form.
    """
    layouts = {key: _find_layout(permutation, key, value, transposed) for key, value in adapter.shapes.items()}
    return adapter.map(lambda key, value: permutation.move(value, layouts[key]))


def is_adapter(names: Iterable[str]) -> bool:
    """Whether some of these are names of a LoRA's tensors."""
    return any(_LORA.fullmatch(name) for name in names)


def _find_layout(permutation: Permutation, key: str, value: Tensor, transposed: bool) -> Layout:
    symmetry = permutation.symmetry
    match = _LORA.fullmatch(key)
    if match is None:
        plain = re.sub(r"^base_model\.model\.|\.base_layer|\.modules_to_save(\.default)?", "", key)
        if plain not in symmetry.layouts:
            raise ValueError(f"{key!r} is not part of a LoRA, nor of the model that the permutation belongs to")
        return _check_shape(key, value, symmetry.layouts[plain])
    weight = f"{match['module']}.weight"
    if weight not in symmetry.layouts:
        raise ValueError(f"{key!r} belongs to {weight!r}, which the permutation does not know")
    layout, part = symmetry.layouts[weight], match["part"]
    embedding = part.startswith("lora_embedding")
    output, inputs = (1, 0) if embedding or transposed else (0, 1)
    if len(layout) < 2:
        raise ValueError(f"{key!r} belongs to {weight!r}, which has {len(layout)} axes and not two")
    if part.endswith("_A"):
        axes: Layout = (Factor(value.shape[0]), _independent_axis(permutation, weight, inputs), *layout[2:])
    else:
        axes = (_independent_axis(permutation, weight, output), *(Factor(n) for n in value.shape[1:]))
    return _check_shape(key, value, axes)


def _independent_axis(permutation: Permutation, key: str, axis: int) -> Term:
    """One axis of a tensor's layout; refused if it depends on another axis."""
    layout = permutation.symmetry.layouts[key]
    for parent, siblings in dependencies(layout[axis], permutation.symmetry.parents):
        if find_parent(layout, axis, siblings, parent) != axis:
            raise ValueError(f"axis {axis} of {key!r} moves differently for every {parent!r}: a LoRA cannot follow it")
    return layout[axis]


def _check_shape(key: str, value: Tensor, layout: Layout) -> Layout:
    expected = tuple(term.size for term in layout)
    if tuple(value.shape) != expected:
        raise ValueError(f"{key!r} has shape {tuple(value.shape)}, the permutation expects {expected}")
    return layout
