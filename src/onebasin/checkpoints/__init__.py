"""Checkpoints on disk: opened lazily, written in the layout they came in."""

from onebasin.checkpoints.adapters import move_adapter
from onebasin.checkpoints.architectures import Architecture, find_architecture
from onebasin.checkpoints.checkpoint import Checkpoint
from onebasin.checkpoints.checkpoint_set import CheckpointSet, open_models
from onebasin.checkpoints.companion_files import find_companions
from onebasin.checkpoints.input_protection import check_apart
from onebasin.checkpoints.optimizer_states import move_optimizer
from onebasin.checkpoints.reading import open_checkpoint
from onebasin.checkpoints.tensor_names import check_finite, fit_names
from onebasin.checkpoints.training_states import TrainingEntries, move_training_entries, note_left_entries
from onebasin.checkpoints.unknown_tensors import check_left
from onebasin.checkpoints.writing import check_entries, check_output, write_checkpoint

__all__ = [
    "Architecture",
    "Checkpoint",
    "CheckpointSet",
    "TrainingEntries",
    "check_apart",
    "check_entries",
    "check_finite",
    "check_left",
    "check_output",
    "find_architecture",
    "find_companions",
    "fit_names",
    "move_adapter",
    "move_optimizer",
    "move_training_entries",
    "note_left_entries",
    "open_checkpoint",
    "open_models",
    "write_checkpoint",
]
