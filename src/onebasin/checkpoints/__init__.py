"""Checkpoints on disk: opened lazily, written as they were found."""

from onebasin.checkpoints.naming import check_finite, fit_names
from onebasin.checkpoints.reading import Checkpoint, open_checkpoint
from onebasin.checkpoints.writing import check_output, write_checkpoint

__all__ = ["Checkpoint", "check_finite", "check_output", "fit_names", "open_checkpoint", "write_checkpoint"]
