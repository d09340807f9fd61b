"""Several checkpoints of one architecture, opened together and checked against it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onebasin.checkpoints.architectures import SPECIFICATIONS, Architecture, find_architecture
from onebasin.checkpoints.reading import Checkpoint, open_checkpoint
from onebasin.checkpoints.tensor_names import check_finite, fit_names
from onebasin.symmetries import Symmetry


@dataclass(frozen=True)
class Opened:
    """Checkpoints under the names of their architecture.

    Attributes:
        architecture: what they are checkpoints of.
        symmetry: of the architecture.
        checkpoints: in the order in which they were named.
    """

    architecture: Architecture
    symmetry: Symmetry
    checkpoints: tuple[Checkpoint, ...]

    def load(self) -> list[nn.Module]:
        """The models in memory, for what runs them."""
        return [self.load_one(number) for number in range(len(self.checkpoints))]

    def load_one(self, number: int) -> nn.Module:
        """One of the models in memory; what is narrower than float32 is widened, for precision, and for CPUs without it."""
        model = self.architecture.build()
        model.load_state_dict(self.checkpoints[number].load())
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
) -> Opened:
    """Open checkpoints, find their architecture and its symmetry, and check that all of it fits.

    Args:
        paths: of the checkpoints; those that are open already serve as well.
        specification: of the architecture (see `find_architecture`); if None, the first that is a Hugging Face folder tells.
        input_shapes: of the example inputs, where they are not known.
        ignore: shell patterns for tensors that are not the model's.
        verify: check the symmetry on random weights; by default for models of up to 50 million parameters.
        example_inputs: where they are neither given as shapes nor known.

    Raises:
        ValueError: for anything that does not fit, NaN included, before any work is done.
    """
    opened = [path if isinstance(path, Checkpoint) else open_checkpoint(path) for path in paths]
    if specification is None:
        folders = [checkpoint.layout.folder for checkpoint in opened if checkpoint.layout.folder is not None]
        if not folders:
            raise ValueError(f"the files do not tell their architecture: give it with --model ({SPECIFICATIONS})")
        specification = str(folders[0])
    architecture = find_architecture(specification, input_shapes, example_inputs)
    symmetry = architecture.symmetry(verify)
    shapes = architecture.shapes()
    checkpoints = tuple(fit_names(checkpoint, shapes, symmetry.ties, ignore) for checkpoint in opened)
    for checkpoint in checkpoints:
        check_finite(checkpoint)
        symmetry.bind(checkpoint)
    return Opened(architecture, symmetry, checkpoints)
