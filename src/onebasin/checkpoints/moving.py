"""Find out what a file is and move it: a checkpoint, a task vector, a LoRA, or an optimiser's state."""

from __future__ import annotations

import functools
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.checkpoints.adapters import is_adapter, is_multiplied, move_adapter
from onebasin.checkpoints.checkpoint import TORCH_ENDINGS, Checkpoint
from onebasin.checkpoints.companion_files import find_companions
from onebasin.checkpoints.conversions import fit_to_model
from onebasin.checkpoints.factories import find_factory
from onebasin.checkpoints.hashing import hash_file
from onebasin.checkpoints.input_protection import check_apart
from onebasin.checkpoints.kohya_names import is_kohya, translate_names
from onebasin.checkpoints.optimizer_states import UNNAMED, has_names, is_optimizer_state, move_optimizer
from onebasin.checkpoints.reading import load_plain, open_checkpoint
from onebasin.checkpoints.staging import is_finished
from onebasin.checkpoints.tensor_names import check_finite, fit_names
from onebasin.checkpoints.training_states import TrainingEntries, copy_tensors, move_training_entries, note_left_entries
from onebasin.checkpoints.unknown_tensors import check_left, find_scales, is_quantized, lay_out_scales
from onebasin.checkpoints.writing import check_entries, check_output, write_checkpoint
from onebasin.checkpoints.written_types import widen
from onebasin.engines import LOCAL, Engine
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.files import check_writable, read_json, write_atomically, write_torch
from onebasin.tensors.progress import Progress
from onebasin.tensors.states import LazyState

Beside = Mapping[str, Callable[[Path], None]]
FileKind = Literal["auto", "model", "task-vector", "lora", "optimizer"]


class MovedFile(ABC):
    """The permuted or transformed content of a file, not written yet.

    Attributes:
        kind: what the file was taken for.
    """

    kind: str

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about how it was read."""
        return ()

    def find_source(self) -> Checkpoint | None:
        """The file as a checkpoint, if it is one."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """How much it holds, in a few words."""

    @abstractmethod
    def check(
        self,
        out: Path,
        force: bool = False,
        inputs: Iterable[Path] = (),
        further: Collection[str] = (),
        staged: int = 0,
    ) -> None:
        """Refuse an output that cannot be written, or that is an input.

        Args:
            out: the output.
            force: replace what exists.
            inputs: that must stay as they are.
            further: other files in a folder.
            staged: bytes of the output that are on the disk already.
        """

    @abstractmethod
    def write(
        self,
        out: Path,
        force: bool = False,
        progress: Progress | None = None,
        beside: Beside | None = None,
        engine: Engine = LOCAL,
    ) -> None:
        """Write it, whole or not at all; `beside` are other files in a folder, see `write_checkpoint`."""


def move_file(
    permutation: Permutation | Transform,
    path: str | os.PathLike[str],
    kind: FileKind = "auto",
    transposed: bool | None = None,
    ignore: Collection[str] = (),
    model_only: bool = False,
    dtype: torch.dtype | None = None,
    engine: Engine = LOCAL,
) -> MovedFile:
    """Move a file by a permutation or a transform of the model that it belongs to.

    Args:
        permutation: of the model.
        path: the file or folder.
        kind: what the file is; a "task-vector" may lack tensors of the model. "auto" finds out, except for task vectors.
        transposed: for a LoRA, whether base weights are (inputs, outputs). If None, its configuration says so.
        ignore: shell patterns for tensors that the model does not have. They stay as they are.
        model_only: of a training checkpoint, write the model alone.
        dtype: the type of the floating tensors of what is written. If None, they keep their types.
        engine: where the tensors are looked at.

    Raises:
        FileNotFoundError: if there is nothing there.
        ValueError: if the file is damaged, or does not fit the permutation.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if path.is_file() and (kind == "optimizer" or (kind == "auto" and path.suffix in TORCH_ENDINGS)):
        content = load_plain(path)
        if is_optimizer_state(content):
            if dtype is not None:
                raise ValueError(
                    f"{path} is the state of an optimiser, whose types are those of the model when it is loaded"
                )
            remarks = () if has_names(content) else (UNNAMED,)
            return _MovedOptimizer(path, move_optimizer(permutation, content), remarks)
    if kind == "optimizer":
        raise ValueError(f"{path} is not the state dict of an optimiser: it needs 'state' and 'param_groups'")
    checkpoint = open_checkpoint(path)
    check_finite(checkpoint, engine=engine)
    left = note_left_entries(checkpoint)
    if kind == "lora" or (kind == "auto" and is_adapter(checkpoint)):
        return _move_lora([permutation], checkpoint, (*left, *_warn(permutation)), transposed, dtype)
    symmetry, scales = permutation.symmetry, {} if kind == "task-vector" else find_scales(checkpoint)
    fitted = _fit(checkpoint, symmetry, ignore, kind == "task-vector", scales)
    source = fitted if dtype is None else widen(fitted)
    if kind == "task-vector":
        check_left(fitted, symmetry)
        notes = (*left, *_warn(permutation))
        return _MovedCheckpoint("task vector", fitted, _move_vector(permutation, source), notes, dtype=dtype)
    scales = {name: weight for name, weight in scales.items() if weight in fitted.names.values()}
    check_left(fitted, symmetry, scales)
    if isinstance(permutation, Transform):
        _check_multiplied(permutation, fitted)
    entries = TrainingEntries(notes=left) if model_only else move_training_entries(permutation, fitted, ignore)
    if scales and dtype is not None:
        raise ValueError(f"{path} is quantised, and its types must stay as they are: leave out the other type")
    whole, state, notes = _add_scales(permutation, fitted, scales) if scales else (fitted, permutation.apply(source), ())
    return _MovedCheckpoint("model", whole, state, (*notes, *entries.notes), entries.content, dtype)


def move_lora(elements: Sequence[Permutation | Transform], path: str | os.PathLike[str]) -> MovedFile:
    """Move a LoRA by several permutations or transforms, one after the other.

    Raises:
        ValueError: if the file is damaged, or does not fit one of them.
    """
    checkpoint = open_checkpoint(path)
    check_finite(checkpoint)
    return _move_lora(elements, checkpoint, note_left_entries(checkpoint))


def _move_lora(
    elements: Sequence[Permutation | Transform],
    checkpoint: Checkpoint,
    notes: tuple[str, ...],
    transposed: bool | None = None,
    dtype: torch.dtype | None = None,
) -> MovedFile:
    transposed = _is_transposed(checkpoint) if transposed is None else transposed
    moved: LazyState = checkpoint if dtype is None else widen(checkpoint)
    for element in elements:
        moved = move_adapter(element, moved, transposed)
    return _MovedCheckpoint("lora", checkpoint, moved, (*notes, *_name_others(elements[0], checkpoint)), dtype=dtype)


def _fit(
    checkpoint: Checkpoint, symmetry: Symmetry, ignore: Collection[str], partial: bool, apart: Collection[str]
) -> Checkpoint:
    """The checkpoint under the names of a symmetry. If they do not fit, the configuration beside it may tell the names."""
    shapes = {key: torch.empty([term.size for term in layout], device="meta") for key, layout in symmetry.layouts.items()}
    try:
        return fit_names(checkpoint, shapes, symmetry.ties, ignore, partial, apart)
    except ValueError as error:
        folder = checkpoint.layout.hugging_face_folder
        if folder is None or importlib.util.find_spec("transformers") is None:
            raise
        try:
            make = find_factory(str(folder), checkpoint.shapes).make
            checkpoint = fit_to_model(checkpoint, make, ignore, partial, apart)
        except ValueError:
            raise error from None
    return fit_names(checkpoint, shapes, symmetry.ties, ignore, partial)


def _check_multiplied(transform: Transform, model: Checkpoint) -> None:
    for key, value in model.shapes.items():
        if is_quantized(value) and is_multiplied(transform, key):
            raise ValueError(
                f"{model.names.get(key, key)!r} in {model.path} has the type {value.dtype}: it can be permuted, but not "
                "be multiplied by this transform"
            )


def _add_scales(
    permutation: Permutation | Transform, model: Checkpoint, scales: Mapping[str, str]
) -> tuple[Checkpoint, LazyState, tuple[str, ...]]:
    """A checkpoint with its scales and zero points; its state, in which they are moved with their rows; a note."""
    layouts, moved = lay_out_scales(scales, model, permutation.symmetry), permutation.apply(model)
    own = permutation.permutation if isinstance(permutation, Transform) else permutation

    scaled = model.original.map(functools.partial(_move_scale, own, layouts))
    shapes = {**model.shapes, **{name: model.original.shapes[name] for name in scales}}
    names = {**model.names, **{name: name for name in scales}}
    read_whole = functools.partial(_read_either, frozenset(layouts), model.original, model)
    whole = Checkpoint(shapes, read_whole, model.layout, names, model.notes, model.original, model.conversions)
    remark = f"scales and zero points of quantised weights, such as {next(iter(scales))}, are moved with them"
    return whole, LazyState(shapes, functools.partial(_read_either, frozenset(layouts), scaled, moved)), (remark,)


def _read_either(keys: frozenset[str], first: LazyState, other: LazyState, key: str) -> Tensor:
    return first[key] if key in keys else other[key]


def _move_scale(permutation: Permutation, layouts: Mapping[str, Any], key: str, value: Tensor) -> Tensor:
    return permutation.move(value, layouts[key])


def _move_vector(permutation: Permutation | Transform, vector: LazyState) -> LazyState:
    if isinstance(permutation, Transform):
        return permutation.apply_difference(vector).lazily()
    return vector.map(permutation.move_tensor)


def _name_others(permutation: Permutation | Transform, adapter: Checkpoint) -> tuple[str, ...]:
    """A note if a file has LoRAs of several networks, of which one is moved."""
    others = translate_names(permutation.symmetry, adapter.shapes).other_networks if is_kohya(adapter) else ()
    return (f"LoRAs of other networks stay as they are: {', '.join(others)}",) if others else ()


def _warn(permutation: Permutation | Transform) -> tuple[str, ...]:
    """What nothing in an adapter or a task vector tells."""
    if not isinstance(permutation, Transform) or not permutation.matrices or not permutation.symmetry.fixed:
        return ()
    return ("this transform is for models in canonical form, and the file must belong to such a one",)


@dataclass(frozen=True)
class _MovedCheckpoint(MovedFile):
    kind: str
    checkpoint: Checkpoint
    state: LazyState
    remarks: tuple[str, ...] = ()
    entries: Mapping[Any, Any] | None = None
    dtype: torch.dtype | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.checkpoint.notes, *self.remarks, *find_companions(self.checkpoint).notes)

    def find_source(self) -> Checkpoint:
        return self.checkpoint

    def describe(self) -> str:
        return f"{len(self.checkpoint.original)} tensors"

    def check(
        self,
        out: Path,
        force: bool = False,
        inputs: Iterable[Path] = (),
        further: Collection[str] = (),
        staged: int = 0,
    ) -> None:
        check_output(out, self.checkpoint, force, inputs, further, self.dtype, staged)
        check_entries(out, self.checkpoint, self.entries)

    def write(
        self,
        out: Path,
        force: bool = False,
        progress: Progress | None = None,
        beside: Beside | None = None,
        engine: Engine = LOCAL,
    ) -> None:
        write_checkpoint(
            out, self.state, self.checkpoint, force, progress, beside, entries=self.entries, dtype=self.dtype, engine=engine
        )


@dataclass(frozen=True)
class _MovedOptimizer(MovedFile):
    path: Path
    content: dict[str, Any]
    remarks: tuple[str, ...] = ()
    kind: str = "optimizer"

    @property
    def notes(self) -> tuple[str, ...]:
        return self.remarks

    def describe(self) -> str:
        return f"the states of {len(self.content['state'])} parameters"

    def check(
        self,
        out: Path,
        force: bool = False,
        inputs: Iterable[Path] = (),
        further: Collection[str] = (),
        staged: int = 0,
    ) -> None:
        check_apart(out, [self.path, *inputs])
        check_writable(out, force)

    def write(
        self,
        out: Path,
        force: bool = False,
        progress: Progress | None = None,
        beside: Beside | None = None,
        engine: Engine = LOCAL,
    ) -> None:
        journal = engine.journal
        if is_finished(journal, out.absolute()):
            return
        self.check(out, force)

        def write_file(file: Path) -> None:
            write_torch(file, copy_tensors(self.content))
            if journal is not None:
                journal.promise(out, {"": hash_file(file)})

        write_atomically(out, write_file, durable=journal is not None)


def _is_transposed(checkpoint: Checkpoint) -> bool:
    path = checkpoint.path
    file = (path if path.is_dir() else path.parent) / "adapter_config.json"
    try:
        return bool(read_json(file).get("fan_in_fan_out", False)) if file.is_file() else False
    except (ValueError, AttributeError, OSError):
        raise ValueError(f"{file} is not a configuration, or it is damaged") from None
