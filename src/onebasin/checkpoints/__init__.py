"""Checkpoints on disk: opened lazily, written as they were found."""

from onebasin.checkpoints.adapters import move_adapter, move_optimizer
from onebasin.checkpoints.architectures import Architecture, find_architecture
from onebasin.checkpoints.checkpoint_set import Opened, open_models
from onebasin.checkpoints.reading import Checkpoint, open_checkpoint
from onebasin.checkpoints.tensor_names import check_finite, fit_names
from onebasin.checkpoints.writing import check_output, write_checkpoint

__all__ = [
    "Architecture",
    "Checkpoint",
    "Opened",
    "check_finite",
    "check_output",
    "find_architecture",
    "fit_names",
    "move_adapter",
    "move_optimizer",
    "open_checkpoint",
    "open_models",
    "write_checkpoint",
]
