"""Move what hangs on a model along with it: task vectors, low-rank adapters, the states of optimisers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from onebasin.symmetries import Permutation
from onebasin.symmetries.layout import Factor, Layout, Term, dependencies, find_parent
from onebasin.tensors.states import LazyState

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)


def move_adapter(permutation: Permutation, adapter: LazyState, transposed: bool = False) -> LazyState:
    """A LoRA (in PEFT's names) for the permuted model: W + B A becomes its permutation.

    A takes the base weight's input axis and B its output axis; their rank axis stays. A magnitude vector (DoRA) takes the
    output axis; a bias, or a module that was trained whole, moves as the model's own tensor does.

    Args:
        permutation: of the base model.
        adapter: its tensors.
        transposed: base weights are (inputs, outputs), as in GPT-2 (``fan_in_fan_out`` of PEFT's configuration).

    Raises:
        ValueError: for a tensor that belongs to nothing in the model, or whose axis moves differently for every unit of the
            other one, so that the product has no low-rank form.
    """
    layouts = {key: _adapter_layout(permutation, key, value, transposed) for key, value in adapter.shapes.items()}
    return adapter.map(lambda key, value: permutation.move(value, layouts[key]))


def is_adapter(names: Sequence[str]) -> bool:
    """Whether these are the names of a LoRA."""
    return any(_LORA.fullmatch(name) for name in names)


def _adapter_layout(permutation: Permutation, key: str, value: Tensor, transposed: bool) -> Layout:
    symmetry = permutation.symmetry
    match = _LORA.fullmatch(key)
    if match is None:
        plain = re.sub(r"^base_model\.model\.|\.base_layer|\.modules_to_save(\.default)?", "", key)
        if plain not in symmetry.layouts:
            raise ValueError(f"{key!r} is not part of a LoRA, nor of the model that the permutation belongs to")
        return _checked(key, value, symmetry.layouts[plain])
    weight = f"{match['module']}.weight"
    if weight not in symmetry.layouts:
        raise ValueError(f"{key!r} belongs to {weight!r}, which the permutation does not know")
    layout, part = symmetry.layouts[weight], match["part"]
    embedding = part.startswith("lora_embedding")
    output, inputs = (1, 0) if embedding or transposed else (0, 1)
    if len(layout) < 2:
        raise ValueError(f"{key!r} belongs to {weight!r}, which has {len(layout)} axes and not two")
    if part.endswith("_A"):
        axes: Layout = (Factor(value.shape[0]), _alone(permutation, weight, inputs), *layout[2:])
    elif part.endswith("_B"):
        axes = (_alone(permutation, weight, output), *(Factor(n) for n in value.shape[1:]))
    else:
        axes = (_alone(permutation, weight, output), *(Factor(n) for n in value.shape[1:]))
    return _checked(key, value, axes)


def _alone(permutation: Permutation, key: str, axis: int) -> Term:
    """One axis of a tensor's layout, which must not depend on the others."""
    layout = permutation.symmetry.layouts[key]
    for parent, siblings in dependencies(layout[axis], permutation.symmetry.parents):
        if find_parent(layout, axis, siblings, parent) != axis:
            raise ValueError(f"axis {axis} of {key!r} moves differently for every {parent!r}: a LoRA cannot follow it")
    return layout[axis]


def _checked(key: str, value: Tensor, layout: Layout) -> Layout:
    expected = tuple(term.size for term in layout)
    if tuple(value.shape) != expected:
        raise ValueError(f"{key!r} has shape {tuple(value.shape)}, the permutation expects {expected}")
    return layout


def move_optimizer(permutation: Permutation, saved: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """The state dict of an optimiser, as ``optimizer.state_dict()`` wrote it, for the permuted model.

    Args:
        permutation: of the model.
        saved: with the entries "state" and "param_groups".
        names: of the parameters, in the order in which the optimiser got them. If None: those that newer optimisers save
            themselves, or all parameters in the order of the model.

    Raises:
        ValueError: if it is no such state dict, or names and shapes do not fit.
    """
    try:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        states = {number: dict(saved["state"].get(number, {})) for number in numbers}
        own = [name for group in saved["param_groups"] for name in group.get("param_names", ())]
    except (KeyError, TypeError, AttributeError):
        raise ValueError("this is not the state dict of an optimiser: it needs 'state' and 'param_groups'") from None
    order = list(names or own or _parameters(permutation))
    if len(order) != len(numbers):
        raise ValueError(f"the optimiser has {len(numbers)} parameters, the model {len(order)}: their names are needed")
    moved = {}
    for number, name in zip(numbers, order, strict=True):
        if name not in permutation.symmetry.layouts:
            raise ValueError(f"the permutation does not know the optimiser's parameter {name!r}")
        layout = permutation.symmetry.layouts[name]
        entries = {}
        for what, value in states[number].items():
            held = isinstance(value, Tensor) and value.dim() > 0
            entries[what] = permutation.move(value, _checked(f"{what} of {name}", value, layout)) if held else value
        if entries:
            moved[number] = entries
    return {**saved, "state": moved}


def _parameters(permutation: Permutation) -> list[str]:
    repeated = {key for tied in permutation.symmetry.ties for key in tied[1:]}
    layouts = permutation.symmetry.layouts
    return [key for key in layouts if key not in repeated and key.rpartition(".")[2] not in _STATISTICS]
