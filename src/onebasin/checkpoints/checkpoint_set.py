"""Several checkpoints of one architecture, opened together and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.checkpoints.architectures import Architecture, find_architecture
from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.conversions import fit_to_model
from onebasin.checkpoints.factories import SPECIFICATIONS
from onebasin.checkpoints.reading import open_checkpoint
from onebasin.checkpoints.tensor_names import check_finite
from onebasin.checkpoints.unknown_tensors import find_scales
from onebasin.engines import LOCAL, Engine
from onebasin.symmetries import Symmetry
from onebasin.tensors.comparison import is_mixed

_CONVERT = "such weights can be moved by a saved permutation (onebasin apply), and must be converted for all else"


@dataclass(frozen=True)
class CheckpointSet:
    """Checkpoints of one architecture, their tensors under its names.

    Attributes:
        architecture: the architecture.
        symmetry: its symmetry.
        checkpoints: in the order in which they were given.
        remarks: for the user, about all of them together.
    """

    architecture: Architecture
    symmetry: Symmetry
    checkpoints: tuple[Checkpoint, ...]
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Remarks for the user about the architecture and about each checkpoint, with its path."""
        notes = [f"{checkpoint.path}: {note}" for checkpoint in self.checkpoints for note in checkpoint.notes]
        return [*self.architecture.notes, *self.remarks, *notes]

    def own_architectures(self) -> list[Architecture]:
        """For each checkpoint the architecture of its own configuration, if it has one, else that of all of them.

        Configurations can differ in what the shapes of tensors do not show, such as the activation.
        """
        found = [self.architecture] * len(self.checkpoints)
        for number, checkpoint in enumerate(self.checkpoints):
            folder = checkpoint.layout.hugging_face_folder
            if folder is not None and str(folder) != self.architecture.name:
                inputs, tensors = self.architecture.example_inputs, checkpoint.original.shapes
                found[number] = find_architecture(str(folder), example_inputs=inputs, tensors=tensors)
        return found

    def load(self, dtype: torch.dtype | None = None) -> list[nn.Module]:
        """All models in memory; see `load_model`."""
        return [self.load_model(checkpoint, dtype) for checkpoint in self.checkpoints]

    def load_model(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> nn.Module:
        """The model of one of the checkpoints. Types narrower than float32 are widened: some CPUs cannot run them.

        Args:
            checkpoint: whose tensors it gets.
            dtype: what will be written, if that is another type: float64 is computed in, so that nothing is rounded before.
        """
        model = self.architecture.build()
        if dtype == torch.float64:
            model = model.double()
        model.load_state_dict(checkpoint.load())
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.itemsize < 4:
                tensor.data = tensor.data.float()
        return model


def open_models(
    paths: Sequence[str | os.PathLike[str] | Checkpoint],
    specification: str | None = None,
    input_shapes: Sequence[str] = (),
    ignore: Collection[str] = (),
    verify: bool | None = None,
    example_inputs: Any = None,
    engine: Engine = LOCAL,
    before_reading: Callable[[CheckpointSet], None] | None = None,
) -> CheckpointSet:
    """Open checkpoints, find their architecture and its symmetry, and check that they fit it.

    Args:
        paths: the checkpoints; some may be open already.
        specification: the architecture, see `find_architecture`. If None, the first Hugging Face folder among the
            checkpoints defines it.
        input_shapes: shapes of the example inputs, see `find_architecture`.
        ignore: shell patterns for tensors that the model does not have.
        verify: check the symmetry on random weights; by default for models of up to 50 million parameters.
        example_inputs: used if no shapes are given and the architecture has no example inputs of its own.
        engine: where the tensors are looked at.
        before_reading: called before any tensor is read, to refuse more.

    Raises:
        ValueError: if a checkpoint does not fit, is quantised, or holds NaN or infinity.

    >>> import sys, tempfile, torch
    >>> from pathlib import Path
    >>> from torch import nn
    >>> from onebasin.checkpoints import open_models
    >>> folder = Path(tempfile.mkdtemp())
    >>> code = "from torch import nn; make = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"
    >>> sys.path.append(str(folder))
    >>> _ = (folder / "two_nets.py").write_text(code)
    >>> for name in ("a.pt", "b.pt"):
    ...     torch.save(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict(), folder / name)
    >>> models = open_models([folder / "a.pt", folder / "b.pt"], "two_nets:make", ["1,4"])
    >>> len(models.symmetry.groups), len(models.checkpoints)
    (1, 2)
    """
    opened = [path if isinstance(path, Checkpoint) else open_checkpoint(path) for path in paths]
    if specification is None:
        folders = [folder for checkpoint in opened if (folder := checkpoint.layout.hugging_face_folder) is not None]
        if not folders:
            raise ValueError(f"the files do not tell their architecture: give it with --model ({SPECIFICATIONS})")
        specification = str(folders[0])
    largest = max(opened, key=lambda checkpoint: checkpoint.original.num_entries).original
    architecture = find_architecture(specification, input_shapes, example_inputs, largest.shapes)
    shapes = architecture.shapes()
    for checkpoint in opened:
        _check_scales(checkpoint, shapes)
    checkpoints = tuple(fit_to_model(checkpoint, architecture.make, ignore) for checkpoint in opened)
    for checkpoint in checkpoints:
        _check_types(checkpoint, shapes)
    for checkpoint in checkpoints:
        engine.check_states({str(checkpoint.path): checkpoint})
    symmetry = architecture.symmetry(verify)
    for checkpoint in checkpoints:
        symmetry.bind(checkpoint)
    models = CheckpointSet(architecture, symmetry, checkpoints)
    if before_reading is not None:
        before_reading(models)
    check_finite(*checkpoints, engine=engine)
    return models


def _check_scales(checkpoint: Checkpoint, shapes: Mapping[str, Tensor]) -> None:
    """Refuse codes whose scales the model does not have: without them they are other weights."""
    own = {key.rpartition(".")[2] for key in shapes}
    for name, weight in find_scales(checkpoint).items():
        if name.rpartition(".")[2] not in own:
            raise ValueError(f"{weight!r} in {checkpoint.path} is quantised, with the scale {name!r}: {_CONVERT}")


def _check_types(checkpoint: Checkpoint, shapes: Mapping[str, Tensor]) -> None:
    """Refuse codes in place of numbers: a module would take them for weights, and a merge would not average them."""
    for key, value in checkpoint.shapes.items():
        expected = shapes[key]
        if is_mixed(expected) and (value.is_floating_point(), value.is_complex()) != (
            expected.is_floating_point(),
            expected.is_complex(),
        ):
            name = checkpoint.names.get(key, key)
            raise ValueError(
                f"{name!r} in {checkpoint.path} has the type {value.dtype}, and the model computes with "
                f"{expected.dtype}: {_CONVERT}"
            )
