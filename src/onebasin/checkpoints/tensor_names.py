"""From the names of tensors in files to the names in a model: prefixes, aliases of tied tensors, weight norm."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.engines import LOCAL, Engine
from onebasin.engines.work_meter import CHECKING
from onebasin.tensors import comparison
from onebasin.tensors.states import RowReader

PREFIXES = ("module.", "_orig_mod.", "model.", "transformer.", "net.", "encoder.", "bert.", "vit.")
"""Prefixes that wrappers (DataParallel, compile, Lightning) and models with a head add to every name."""
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
    apart: Collection[str] = (),
    defaults: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """The same checkpoint under the names of a model. A prefix is removed or added if needed, which a note reports.

    Args:
        checkpoint: the checkpoint to rename.
        shapes: the model's tensors by name; tensors on the meta device will do.
        ties: sets of names that are one tensor: a checkpoint may leave out all but one of each.
        ignore: shell patterns for tensors that the model does not have. They stay as they are.
        partial: allow tensors to be missing, as in a task vector.
        apart: names of tensors that the model does not have, and that the caller takes care of.
        defaults: tensors that the model makes itself and that a checkpoint may lack.

    Raises:
        ValueError: naming the first tensor that is missing, unknown, or of another shape.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch import nn
    >>> from onebasin.checkpoints import fit_names, open_checkpoint
    >>> folder = Path(tempfile.mkdtemp())
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, folder / "a.pt")
    >>> list(fit_names(open_checkpoint(folder / "a.pt"), model.state_dict()))[:2]
    ['0.weight', '0.bias']
    """
    ignored = {name for name in checkpoint if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)} - {*apart}
    names = [name for name in checkpoint if name not in ignored and name not in apart]
    keys, note = find_renaming(names, shapes)
    for key in keys:
        if key not in shapes:
            name = checkpoint.names.get(keys[key], keys[key])
            raise ValueError(_explain_unknown(checkpoint, name, sum(k not in shapes for k in keys), len(keys)))
        found, expected = (tuple(s.shape) for s in (checkpoint.shapes[keys[key]], shapes[key]))
        if found != expected:
            raise ValueError(f"{keys[key]!r} in {checkpoint.path} has shape {found}, the model has {expected}")
    for tied in ties:
        present = next((key for key in tied if key in keys), None)
        if present is not None:
            keys.update({key: keys[present] for key in tied if key not in keys})
    own = {key: value for key, value in (defaults or {}).items() if key not in keys}
    missing = [key for key in shapes if key not in keys and key not in own]
    if missing and not partial:
        raise ValueError(
            f"{checkpoint.path} has no {missing[0]!r}, which the model has ({len(missing)} of {len(shapes)} are missing)"
        )
    notes = (*checkpoint.notes, *([note] if note else []))
    if ignored:
        first = [name for name in checkpoint if name in ignored][:3]
        notes = (*notes, f"left as they are: {', '.join(first)}{' ...' if len(ignored) > 3 else ''}")
    if own:
        notes = (*notes, f"{next(iter(own))!r} is not in the file, the model makes it itself")
    return _rename(checkpoint, {key: keys[key] for key in shapes if key in keys}, own, notes)


def _rename(
    checkpoint: Checkpoint, sources: Mapping[str, str], own: Mapping[str, Tensor], notes: tuple[str, ...]
) -> Checkpoint:
    """The checkpoint under other names, with tensors that are not in it; `sources` are its names by the new ones."""
    shapes = {key: checkpoint.shapes[name] for key, name in sources.items()}
    shapes |= {key: value.to("meta") for key, value in own.items()}
    names = {key: checkpoint.names[name] for key, name in sources.items() if name in checkpoint.names}
    keys = {name: key for key, name in reversed(list(sources.items()))}
    conversions = [dataclasses.replace(each, keys=tuple(keys[key] for key in each.keys)) for each in checkpoint.conversions]

    read = _Renamed(checkpoint, sources, own)
    return Checkpoint(shapes, read, checkpoint.layout, names, notes, checkpoint.original, tuple(conversions))


@dataclasses.dataclass(frozen=True)
class _Renamed(RowReader):
    checkpoint: Checkpoint
    sources: Mapping[str, str]
    own: Mapping[str, Tensor]

    def __call__(self, key: str) -> Tensor:
        return self.own[key] if key in self.own else self.checkpoint[self.sources[key]]

    def has_rows(self, key: str) -> bool:
        return key not in self.own and self.checkpoint.has_rows(self.sources[key])

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read_rows(self.sources[key], start, stop)

    def find_origin(self, key: str) -> str:
        return key if key in self.own else self.checkpoint.find_origin(self.sources[key])


def find_renaming(names: list[str], shapes: Mapping[str, Tensor]) -> tuple[dict[str, str], str]:
    """Key of the model -> name in the file, for the prefix with which the model knows most names; and a note about it."""
    best, note = {name: name for name in names}, ""
    stacked = ["".join(parts) for count in (1, 2, 3) for parts in itertools.product(PREFIXES[:3], repeat=count)]
    candidates: list[tuple[dict[str, str], str]] = []
    for prefix in dict.fromkeys([*stacked, *PREFIXES]):
        if all(name.startswith(prefix) for name in names):
            stripped = {name.removeprefix(prefix): name for name in names}
            candidates.append((stripped, f"the names in the file begin with {prefix!r}, which was taken off"))
        if any(key.startswith(prefix) for key in shapes):
            added = {name if name in shapes else prefix + name: name for name in names}
            candidates.append((added, f"the names in the file lack the model's {prefix!r}, which was put on"))
    for keys, text in candidates:
        if len(keys) == len(names) and _num_known(keys, shapes) > _num_known(best, shapes):
            best, note = keys, text
    renamed = {_modernise(key, shapes): name for key, name in best.items()}
    if len(renamed) == len(best) and renamed.keys() != best.keys():
        best, note = renamed, "; ".join(filter(None, [note, "weight norm is read under its present names"]))
    return best, note


def _num_known(keys: Iterable[str], shapes: Mapping[str, Tensor]) -> int:
    return sum(_modernise(key, shapes) in shapes for key in keys)


def _modernise(key: str, shapes: Mapping[str, Tensor]) -> str:
    """The name that PyTorch's current weight norm gives a parameter, if the model uses that one."""
    for old, new in _WEIGHT_NORM.items():
        if key.endswith(old) and key not in shapes and key.removesuffix(old) + new in shapes:
            return key.removesuffix(old) + new
    return key


def _explain_unknown(checkpoint: Checkpoint, name: str, count: int, total: int) -> str:
    if name.endswith(tuple(_WEIGHT_NORM)) or ".parametrizations." in name:
        why = "is a parametrisation (weight norm) that the model does not have: remove it before saving, or build it in"
    elif count == total:
        return f"{checkpoint.path} is not a checkpoint of this model, which has none of its tensors ({name!r}, ...)"
    else:
        why = f"is not in the model ({count} such); --ignore PATTERN leaves such tensors as they are"
    return f"{name!r} in {checkpoint.path} {why}"


def check_finite(*checkpoints: Checkpoint, engine: Engine = LOCAL) -> None:
    """Refuse checkpoints that hold NaN or infinity; the engine looks at the tensors.

    Raises:
        ValueError: naming the first such tensor and its file.
    """
    engine.meter.expect(CHECKING, sum(checkpoint.num_bytes for checkpoint in checkpoints))
    for checkpoint in checkpoints:
        with engine.broadcast(checkpoint):
            comparison.check_finite({str(checkpoint.path): checkpoint}, functools.partial(engine.map, stage=CHECKING))
