"""A file and a permutation: what the file is, and how it moves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoints.adapters import is_adapter, move_adapter, move_optimizer
from onebasin.checkpoints.reading import TORCH_ENDINGS, Checkpoint, load_plain, open_checkpoint
from onebasin.checkpoints.tensor_names import check_finite, fit_names
from onebasin.checkpoints.writing import Progress, check_output, write_checkpoint
from onebasin.symmetries import Permutation
from onebasin.tensors.files import check_writable, write_atomically


@dataclass(frozen=True)
class Moved:
    """A file, moved, that is not written yet.

    Attributes:
        kind: what it was taken for.
        description: of its content.
        notes: what a person should know about how it was read.
        check: refuses an output that must not be written.
        write: writes it.
    """

    kind: str
    description: str
    notes: tuple[str, ...]
    check: Callable[[Path, bool, Iterable[Path]], None]
    write: Callable[[Path, bool, Progress | None], None]


def move_file(
    permutation: Permutation,
    path: str | os.PathLike[str],
    kind: str = "auto",
    transposed: bool | None = None,
    ignore: Collection[str] = (),
) -> Moved:
    """Move a checkpoint, a task vector, a LoRA or an optimiser's state by a permutation.

    Args:
        permutation: of the model that the file belongs to.
        path: of the file or folder.
        kind: "model", "task-vector" (may lack tensors), "lora", "optimizer", or "auto" to look.
        transposed: of a LoRA, whether base weights are (inputs, outputs); None to look into its configuration.
        ignore: shell patterns for tensors that are not the model's; they stay as they are.

    Raises:
        ValueError: if the file is damaged, or does not fit the permutation.
    """
    path = Path(path)
    if kind == "optimizer" or (kind == "auto" and path.is_file() and path.suffix in TORCH_ENDINGS):
        content = load_plain(path) if path.is_file() else None
        if isinstance(content, dict) and {"state", "param_groups"} <= content.keys():
            return _move_optimizer(permutation, path, content)
        if kind == "optimizer":
            raise ValueError(f"{path} is not the state dict of an optimiser: it needs 'state' and 'param_groups'")
    checkpoint = open_checkpoint(path)
    check_finite(checkpoint)
    if kind == "lora" or (kind == "auto" and is_adapter(list(checkpoint))):
        transposed = _is_transposed(checkpoint) if transposed is None else transposed
        return _of_checkpoint("lora", checkpoint, move_adapter(permutation, checkpoint, transposed))
    symmetry = permutation.symmetry
    shapes = {key: torch.empty([term.size for term in layout], device="meta") for key, layout in symmetry.layouts.items()}
    partial = kind == "task-vector"
    fitted = fit_names(checkpoint, shapes, symmetry.ties, ignore, partial)
    if partial:
        state = fitted.map(lambda key, value: permutation.move(value, symmetry.layouts[key]))
    else:
        state = permutation.apply(fitted)
    return _of_checkpoint("task vector" if partial else "model", fitted, state)


def _of_checkpoint(kind: str, checkpoint: Checkpoint, state: Any) -> Moved:
    def check(out: Path, force: bool, inputs: Iterable[Path]) -> None:
        check_output(out, checkpoint, force, inputs)

    def write(out: Path, force: bool, progress: Progress | None) -> None:
        write_checkpoint(out, state, checkpoint, force, progress)

    return Moved(kind, f"{len(checkpoint.original)} tensors", checkpoint.notes, check, write)


def _move_optimizer(permutation: Permutation, path: Path, content: dict[str, Any]) -> Moved:
    moved = move_optimizer(permutation, content)

    def check(out: Path, force: bool, inputs: Iterable[Path]) -> None:
        if out.resolve() in {file.resolve() for file in (path, *inputs)}:
            raise ValueError(f"{out} is an input: inputs are never changed")
        check_writable(out, force)

    def write(out: Path, force: bool, progress: Progress | None) -> None:
        check(out, force, ())
        write_atomically(out, lambda file: torch.save(_owned(moved), file))

    return Moved("optimizer", f"the states of {len(moved['state'])} parameters", (), check, write)


def _owned(value: Any) -> Any:
    """Tensors with memory of their own: saved as a view of a mapped file, each would take all of it along."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _owned(entry) for key, entry in value.items()}
    return [_owned(entry) for entry in value] if isinstance(value, list) else value


def _is_transposed(checkpoint: Checkpoint) -> bool:
    path = checkpoint.layout.path
    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    try:
        return bool(json.loads(file.read_text()).get("fan_in_fan_out", False)) if file.is_file() else False
    except (ValueError, AttributeError, OSError):
        raise ValueError(f"{file} is not a configuration, or it is damaged") from None
