"""The names of tensors in files against the names in a model: prefixes, aliases of tied tensors, weight norm."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from onebasin.checkpoints.reading import Checkpoint

PREFIXES = ("module.", "_orig_mod.", "model.", "transformer.", "net.", "encoder.", "bert.", "vit.")
"""What wrappers (DataParallel, compile, Lightning) and models with a head put in front of every name."""
_WEIGHT_NORM = {
    ".weight_g": ".parametrizations.weight.original0",
    ".weight_v": ".parametrizations.weight.original1",
}


def fit_names(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Tensor],
    ties: Iterable[tuple[str, ...]] = (),
    ignore: Collection[str] = (),
    partial: bool = False,
) -> Checkpoint:
    """The same checkpoint under the names of a model; a prefix is taken off, or put on, and reported.

    Args:
        checkpoint: to be renamed.
        shapes: what the model has; meta tensors serve.
        ties: names that are one tensor: a checkpoint may leave out all but one of them.
        ignore: shell patterns for tensors that the model does not have, which stay as they are.
        partial: allow a checkpoint to lack tensors, as a task vector may.

    Raises:
        ValueError: naming the first tensor that is missing, unknown, or of another shape.
    """
    ignored = [name for name in checkpoint if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)]
    names = [name for name in checkpoint if name not in ignored]
    keys, note = _find_renaming(names, shapes)
    for key in keys:
        if key not in shapes:
            raise ValueError(_unknown(checkpoint, keys[key], sum(k not in shapes for k in keys), len(keys)))
        found, expected = (tuple(s.shape) for s in (checkpoint.shapes[keys[key]], shapes[key]))
        if found != expected:
            raise ValueError(f"{keys[key]!r} in {checkpoint.layout.path} has shape {found}, the model has {expected}")
    for tied in ties:
        present = next((key for key in tied if key in keys), None)
        if present is not None:
            keys.update({key: keys[present] for key in tied if key not in keys})
    missing = [key for key in shapes if key not in keys]
    if missing and not partial:
        raise ValueError(
            f"{checkpoint.layout.path} has no {missing[0]!r}, which the model has "
            f"({len(missing)} of {len(shapes)} are missing)"
        )
    ordered = {key: keys[key] for key in shapes if key in keys}
    notes = (*checkpoint.notes, *([note] if note else []))
    if ignored:
        notes = (*notes, f"left as they are: {', '.join(ignored[:3])}{' ...' if len(ignored) > 3 else ''}")
    renamed = {key: checkpoint.shapes[name] for key, name in ordered.items()}
    return Checkpoint(renamed, lambda key: checkpoint[ordered[key]], checkpoint.layout, ordered, notes, checkpoint.original)


def _find_renaming(names: list[str], shapes: Mapping[str, Tensor]) -> tuple[dict[str, str], str]:
    """Key of the model -> name in the file, for the prefix under which most names are known; and a note about it."""
    best, note = {name: name for name in names}, ""
    stacks = ["".join(parts) for count in (1, 2, 3) for parts in itertools.product(PREFIXES[:3], repeat=count)]
    candidates: list[tuple[dict[str, str], str]] = []
    for prefix in dict.fromkeys([*stacks, *PREFIXES]):
        if all(name.startswith(prefix) for name in names):
            stripped = {name.removeprefix(prefix): name for name in names}
            candidates.append((stripped, f"the names in the file begin with {prefix!r}, which was taken off"))
        if any(key.startswith(prefix) for key in shapes):
            added = {name if name in shapes else prefix + name: name for name in names}
            candidates.append((added, f"the names in the file lack the model's {prefix!r}, which was put on"))
    for keys, text in candidates:
        if len(keys) == len(names) and _num_known(keys, shapes) > _num_known(best, shapes):
            best, note = keys, text
    renamed = {_modern(key, shapes): name for key, name in best.items()}
    if len(renamed) == len(best) and renamed.keys() != best.keys():
        best, note = renamed, "; ".join(filter(None, [note, "weight norm is read under its present names"]))
    return best, note


def _num_known(keys: Iterable[str], shapes: Mapping[str, Tensor]) -> int:
    return sum(_modern(key, shapes) in shapes for key in keys)


def _modern(key: str, shapes: Mapping[str, Tensor]) -> str:
    """The name that weight norm gives its parameters today, if the model uses that one."""
    for old, new in _WEIGHT_NORM.items():
        if key.endswith(old) and key not in shapes and key.removesuffix(old) + new in shapes:
            return key.removesuffix(old) + new
    return key


def _unknown(checkpoint: Checkpoint, name: str, count: int, total: int) -> str:
    if name.endswith(tuple(_WEIGHT_NORM)) or ".parametrizations." in name:
        why = "is a parametrisation (weight norm) that the model does not have: remove it before saving, or build it in"
    elif count == total:
        return f"{checkpoint.layout.path} is not a checkpoint of this model, which has none of its tensors ({name!r}, ...)"
    else:
        why = f"is not in the model ({count} such); --ignore PATTERN leaves such tensors as they are"
    return f"{name!r} in {checkpoint.layout.path} {why}"


def check_finite(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that holds NaN or infinity, naming the first tensor that does."""
    for key, value in checkpoint.items():
        if value.is_floating_point() and not bool(torch.isfinite(value.float() if value.itemsize < 2 else value).all()):
            raise ValueError(f"{checkpoint.names[key]!r} in {checkpoint.layout.path} holds NaN or infinity")
