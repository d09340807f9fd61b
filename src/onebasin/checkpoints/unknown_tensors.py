"""Tensors that a model does not have, and that lie beside its weights: which of them move with the weights.

A quantised checkpoint holds codes in place of weights (integers or float8), and scales and zero points in the same module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from onebasin.checkpoints.adapters import check_independent
from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import Factor, Layout, factors, names
from onebasin.tensors.comparison import is_mixed
from onebasin.tensors.states import LazyState

_SCALE = re.compile(r"(weight_)?(scales?|scale_inv|zero_points?|zeros|offset)|SCB")
"""Names that libraries give the scales and zero points of a module's weight."""


def find_scales(checkpoint: LazyState) -> dict[str, str]:
    """For each scale and zero point of a quantised weight the name of the weight.

    >>> import torch
    >>> shapes = {"fc.weight": torch.empty(2, 3, dtype=torch.int8), "fc.weight_scale": torch.empty(2, 1)}
    >>> find_scales(LazyState(shapes, shapes.__getitem__))
    {'fc.weight_scale': 'fc.weight'}
    """
    found = {}
    for name in checkpoint:
        module, dot, last = name.rpartition(".")
        weight = f"{module}{dot}weight"
        if _SCALE.fullmatch(last) and weight in checkpoint and is_quantized(checkpoint.shapes[weight]):
            found[name] = weight
    return found


def lay_out_scales(scales: Mapping[str, str], model: Checkpoint, symmetry: Symmetry) -> dict[str, Layout]:
    """The layouts of scales and zero points that move with the rows of their weights, or not at all.

    Args:
        scales: from their names to those of the weights, in the files.
        model: the checkpoint under the names of the model.
        symmetry: of the model.

    Raises:
        ValueError: for one that has more than a number for each row, if the weight moves.
    """
    keys, found = {name: key for key, name in model.names.items()}, {}
    for name, weight in scales.items():
        shape, layout = tuple(model.original.shapes[name].shape), symmetry.layouts[keys[weight]]
        fixed = [Factor(extent) for extent in shape]
        if model.original.shapes[name].numel() == 1 or not _free_sizes(layout, symmetry):
            found[name] = tuple(fixed)
        elif max(shape) == model.original.shapes[name].numel() == shape[0] == layout[0].size:
            check_independent(symmetry, keys[weight], 0)
            found[name] = (layout[0], *fixed[1:])
        else:
            raise ValueError(
                f"{name!r} in {model.path} has shape {shape}, which is not one number for each row of {weight!r}: "
                "it cannot follow when units move"
            )
    return found


def check_left(model: Checkpoint, symmetry: Symmetry, followed: Iterable[str] = ()) -> None:
    """Refuse tensors that would be left as they are beside weights that move, and may have to move with them.

    Those are tensors in the module of such a weight, or inside that module, that have an axis as long as one that moves; all
    tensors, if the weight is quantised. A single number may stay.

    Args:
        model: the checkpoint under the names of the model. All other tensors in its files would be left.
        symmetry: of the model.
        followed: the names of those that do move.

    Raises:
        ValueError: naming the first such tensor.
    """
    modules: dict[str, list[tuple[str, str]]] = {}
    for key, name in model.pairs:
        modules.setdefault(name.rpartition(".")[0], []).append((key, name))
    known = {*(name for _, name in model.pairs), *followed}
    for name, value in model.original.shapes.items():
        module = name.rpartition(".")[0]
        if name in known or value.numel() <= 1:
            continue
        parts = module.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)] if module else [""]
        for key, other in (pair for each in around for pair in modules.get(each, ())):
            sizes = _free_sizes(symmetry.layouts[key], symmetry)
            if sizes and (is_quantized(model.shapes[key]) or sizes & set(value.shape)):
                raise ValueError(
                    f"{name!r} in {model.path} is not in the model, but beside {other!r}, whose units move: "
                    "it may have to move with them, and cannot be left as it is"
                )


def is_quantized(weight: Tensor) -> bool:
    """Whether a tensor holds codes: integers, or numbers of eight bits."""
    return not is_mixed(weight) or weight.itemsize == 1


def _free_sizes(layout: Layout, symmetry: Symmetry) -> set[int]:
    """The lengths of the axes that move, and of the groups in them."""
    groups = {*symmetry.groups, *(basis.group for basis in symmetry.bases.values())}
    axes = {term.size for term in layout if names((term,)) & groups}
    return axes | {factor.size for term in layout for factor in factors(term) if factor.name in groups}
