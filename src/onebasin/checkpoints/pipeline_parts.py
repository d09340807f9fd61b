"""The parts of a diffusers pipeline, a folder of folders: which there are, by its ``model_index.json``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from onebasin.tensors.files import read_json

INDEX_NAME = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_WITHOUT_WEIGHTS = re.compile(r"\w*(Scheduler|Tokenizer(Fast)?|Processor(Fast|Pil)?|FeatureExtractor(Fast)?)")
_CARRIED = ("StableDiffusionSafetyChecker",)
"""Classes of models that judge images and make none: they stay as they are, and are not mixed."""


class Part(NamedTuple):
    """What a pipeline says about one of its parts.

    Attributes:
        library: that its class belongs to.
        class_name: of the part.
    """

    library: str
    class_name: str

    @property
    def has_weights(self) -> bool:
        """Whether it is a model; if not, it is a scheduler, a tokenizer or the like."""
        return _WITHOUT_WEIGHTS.fullmatch(self.class_name) is None

    @property
    def is_carried(self) -> bool:
        """Whether it is a model that stays as it is."""
        return self.class_name in _CARRIED

    @property
    def is_moved(self) -> bool:
        """Whether it is a model that is aligned and merged."""
        return self.has_weights and not self.is_carried


def is_pipeline(path: Path) -> bool:
    """Whether a folder has the index of a pipeline."""
    return (path / INDEX_NAME).is_file()


def find_parts(path: Path) -> dict[str, Part]:
    """The parts of a pipeline by their names, which are those of their folders; none for every other file or folder.

    Raises:
        ValueError: if the index is damaged, names code, or a part that is not a folder of its own.
    """
    if not is_pipeline(path):
        return {}
    file = path / INDEX_NAME
    try:
        content = read_json(file)
    except (ValueError, OSError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not the index of a pipeline, or it is damaged")
    kind = content.get("_class_name")
    if not (isinstance(kind, str) and kind.isidentifier()):
        raise ValueError(f"{file} does not name a class of diffusers, and code in a folder is never run")
    entries = {name: value for name, value in content.items() if not name.startswith("_") and isinstance(value, list)}
    parts = {name: _read_part(name, value, file) for name, value in entries.items() if value != [None, None]}
    if not any(part.is_moved for part in parts.values()):
        raise ValueError(f"{file} names no part with weights")
    for name in parts:
        if (path / name).is_symlink() or not (path / name).is_dir():
            raise ValueError(f"{file} names the part {name}, but {path / name} is not a folder")
    return parts


def _read_part(name: str, value: Any, file: Path) -> Part:
    if not (name.isascii() and name.isidentifier()) or hasattr(nn.Module(), name):
        raise ValueError(f"{file} names a part {name!r}, which is not the name of a part")
    if len(value) != 2 or not all(isinstance(word, str) and word.isidentifier() for word in value):
        raise ValueError(f"{file} should name a library and a class for the part {name}, not {str(value)[:60]}")
    part = Part(*value)
    if part.library not in _LIBRARIES and not part.is_carried:
        raise ValueError(
            f"{file} takes the part {name} from {part.library!r}, which is neither diffusers nor transformers: code in a "
            "folder is never run"
        )
    return part
