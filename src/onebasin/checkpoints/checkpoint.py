"""A checkpoint as a value: its tensors, read when they are asked for, and the files they are in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onebasin.checkpoints.remote_files import RemoteFile
from onebasin.tensors.states import LazyState

_Entry = TypeVar("_Entry")

# In the order in which `from_pretrained` looks for them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin",
)
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""The names of types in the headers of safetensors files."""


@dataclass(frozen=True)
class FileLayout:
    """Which files a checkpoint consists of, and what is in each.

    Attributes:
        path: the file or folder that the user named.
        place: the same as an absolute path, which stays right in another working folder.
        files: for each weight file, the names of the tensors in it; absolute paths, which workers can read.
        index: the file that says which shard holds which tensor, if there are shards.
        container: in a PyTorch file, the entry that holds the state dict; "" if the file is the state dict.
        extras: in a PyTorch file, entries of the state dict that are no tensors.
        read_others: returns the entries of a PyTorch file beside the container.
        metadata: for each safetensors file, the metadata in its header.
        parts: of a pipeline, the layout of each part by its name, which is that of its folder. In `files` the names of
            tensors then begin with that of their part. Parts such as a tokenizer have no weight files.
        untied: keys that a copy has tensors of their own for, as its configuration says; see `untie_checkpoint`.
        origins: of a checkpoint in an object store, for each file what it stands for. Weight files are there alone.
    """

    path: Path
    files: Mapping[Path, tuple[str, ...]]
    index: Path | None = None
    container: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    read_others: Callable[[], Mapping[Any, Any]] = dict
    metadata: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    parts: Mapping[str, FileLayout] = field(default_factory=dict)
    untied: tuple[str, ...] = ()
    origins: Mapping[Path, RemoteFile] = field(default_factory=dict)
    place: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.path.absolute())

    @property
    def is_folder(self) -> bool:
        """Whether a copy of it is a folder: the original is one, or has several files."""
        return self.place.is_dir() or self.index is not None

    @property
    def hugging_face_folder(self) -> Path | None:
        """The folder, if there is one and it has a configuration, or is a pipeline."""
        has_configuration = bool(self.parts) or (self.place / "config.json").is_file()
        return self.path if self.place.is_dir() and has_configuration else None

    @property
    def weight_files(self) -> dict[str, Path]:
        """The weight files and indices of shards, by their places in the folder that a copy of this is."""
        if self.parts:
            return {
                f"{name}/{place}": file for name, part in self.parts.items() for place, file in part.weight_files.items()
            }
        return {file.name: file for file in (*self.files, *([self.index] if self.index is not None else []))}


@dataclass(frozen=True)
class Conversion:
    """Tensors in files that are other tensors in the model, such as experts that the model keeps in one stack.

    Attributes:
        names: of the tensors in the files.
        keys: of the tensors in the model that they become.
        convert: from the tensors in the files to those in the model.
        restore: back, exactly.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], list[Tensor]]
    restore: Callable[[Sequence[Tensor]], list[Tensor]]


class Checkpoint(LazyState):
    """A checkpoint on disk as a lazy state.

    Attributes:
        layout: its files.
        names: for each key the name of its tensor in the files. Keys without one are in the conversions, or the model makes
            their tensors itself.
        notes: remarks for the user about how it was read.
        original: the same checkpoint under the names in the files, with every tensor in them.
        conversions: of tensors that are stacked or split otherwise in the files.
    """

    def __init__(
        self,
        shapes: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        layout: FileLayout,
        names: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
        original: Checkpoint | None = None,
        conversions: tuple[Conversion, ...] = (),
    ):
        super().__init__(shapes, read)
        self.layout, self.notes, self.conversions = layout, notes, conversions
        self.names = {key: key for key in shapes} if names is None else dict(names)
        self.original = original or self

    @property
    def path(self) -> Path:
        """The file or folder that the user named."""
        return self.layout.path

    @property
    def unsaved(self) -> list[str]:
        """The keys of tensors that are not in the files, because the model makes them itself."""
        saved = {*self.names, *(key for conversion in self.conversions for key in conversion.keys)}
        return [key for key in self if key not in saved]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each name of a tensor in the files that the model has, behind a key of it. Tied keys share a name."""
        converted = [(each.keys[0], name) for each in self.conversions for name in each.names]
        return [*self.names.items(), *converted]

    @property
    def dtypes(self) -> list[str]:
        """The names of the types of its tensors."""
        return list(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in self.shapes.values()))


def join_parts(layout: FileLayout, parts: Mapping[str, Checkpoint]) -> Checkpoint:
    """The models of a pipeline as one checkpoint, in which the names of tensors begin with that of their part.

    Args:
        layout: of the whole.
        parts: the checkpoints by the names of their parts.
    """
    keys = {f"{name}.{key}": (part, key) for name, part in parts.items() for key in part}
    is_renamed = any(part.original is not part for part in parts.values())
    return Checkpoint(
        {joined: part.shapes[key] for joined, (part, key) in keys.items()},
        functools.partial(_read_joined, keys),
        layout,
        {f"{name}.{key}": f"{name}.{own}" for name, part in parts.items() for key, own in part.names.items()},
        tuple(f"{name}: {note}" for name, part in parts.items() for note in part.notes),
        join_parts(layout, {name: part.original for name, part in parts.items()}) if is_renamed else None,
        tuple(
            replace(
                each,
                names=tuple(f"{name}.{own}" for own in each.names),
                keys=tuple(f"{name}.{key}" for key in each.keys),
            )
            for name, part in parts.items()
            for each in part.conversions
        ),
    )


def _read_joined(keys: Mapping[str, tuple[Checkpoint, str]], joined: str) -> Tensor:
    part, key = keys[joined]
    return part[key]


def split_parts(checkpoint: Checkpoint) -> dict[str, Checkpoint]:
    """The models of a pipeline that was just opened, each as a checkpoint of its own; none if it is no pipeline."""
    found = {}
    for name, layout in checkpoint.layout.parts.items():
        if layout.files:
            notes = [note.removeprefix(f"{name}: ") for note in checkpoint.notes if note.startswith(f"{name}: ")]
            read = functools.partial(_read_part, checkpoint, name)
            found[name] = Checkpoint(take_part(checkpoint.shapes, name), read, layout, notes=tuple(notes))
    return found


def _read_part(checkpoint: Checkpoint, name: str, key: str) -> Tensor:
    return checkpoint[f"{name}.{key}"]


def take_part(tensors: Mapping[str, _Entry], name: str) -> dict[str, _Entry]:
    """Those entries whose names begin with that of a part, without it.

    >>> take_part({"unet.conv.weight": 1, "vae.conv.weight": 2}, "unet")
    {'conv.weight': 1}
    """
    start = f"{name}."
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
