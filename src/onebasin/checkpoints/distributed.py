"""Distributed checkpoints: those of PyTorch (DCP) are read tensor by tensor; partitions of ZeRO are refused.

The file that says where tensors lie, ``.metadata``, is a pickle. No code in it is run: the few classes that it may name are
replaced by records, and everything else is refused. Tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import Checkpoint, FileLayout
from onebasin.checkpoints.file_versions import FileVersion
from onebasin.engines.clock import spent_on
from onebasin.tensors.files import MAX_JSON_BYTES, check_regular

METADATA = ".metadata"
CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt"
"""What makes an ordinary file of a distributed checkpoint."""
_ZERO = ("zero_pp_rank_*", "*/zero_pp_rank_*", "mp_rank_*", "*/mp_rank_*", "bf16_zero_pp_rank_*", "*/bf16_zero_pp_rank_*")
_MODEL = ("model", "module", "state_dict", "model_state_dict", "app")
"""Entries in which the model lies beside the state of an optimiser."""


def check_partitions(folder: Path) -> None:
    """Refuse partitions of DeepSpeed's ZeRO: each holds a piece of a flat vector of all parameters.

    Raises:
        ValueError: with the conversion to run.
    """
    if any(True for pattern in _ZERO for _ in folder.glob(pattern)):
        raise ValueError(
            f"{folder} holds partitions of DeepSpeed (ZeRO), not whole tensors: the script beside them makes a checkpoint, "
            f"python {folder}/zero_to_fp32.py {folder} OUT --safe_serialization"
        )


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of PyTorch."""
    return (folder / METADATA).is_file()


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, and where in which file it is."""

    file: Path
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def open_distributed(folder: Path) -> Checkpoint:
    """Open a distributed checkpoint of PyTorch; the state of an optimiser beside the model is left out.

    Raises:
        ValueError: if it is damaged, holds more than its format has, or a file is missing.
    """
    try:
        found = _read_metadata(folder / METADATA)
        tensors, pieces = _find_tensors(folder, found)
    except (pickle.UnpicklingError, KeyError, IndexError, AttributeError, TypeError, EOFError) as error:
        raise ValueError(
            f"{folder / METADATA} is not that of a distributed checkpoint, or it is damaged ({error}): "
            f"{CONVERSION.format(folder=folder)}"
        ) from None
    names, note = _choose_model(tensors)
    files: dict[Path, list[str]] = {}
    for name in names:
        files.setdefault(pieces[name][0].file, []).append(name)
    for file in {piece.file for name in names for piece in pieces[name]}:
        if not file.is_file():
            raise FileNotFoundError(f"{file.name} is missing: {folder / METADATA} expects it beside itself")
        files.setdefault(file, [])
    versions = {file: FileVersion.of(file) for file in files}
    read = functools.partial(_read, {name: tensors[name] for name in names}, pieces, versions)
    layout = FileLayout(folder, {file: tuple(some) for file, some in files.items()})
    return Checkpoint({name: tensors[name] for name in names}, read, layout, notes=(note,) if note else ())


def _choose_model(tensors: Mapping[str, Tensor]) -> tuple[list[str], str]:
    """The tensors of the model, and a note if there are others."""
    for entry in _MODEL:
        names = [name for name in tensors if name.startswith(f"{entry}.")]
        if names and len(names) < len(tensors):
            others = next(name for name in tensors if name not in names)
            return names, f"the model is the entry {entry!r}; others, such as {others}, are left out"
    if not tensors:
        raise ValueError("the distributed checkpoint holds no tensors")
    return list(tensors), ""


def _find_tensors(folder: Path, found: _Record) -> tuple[dict[str, Tensor], dict[str, list[_Piece]]]:
    """Shapes and types by name, and the pieces of each tensor."""
    tensors: dict[str, Tensor] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for name, entry in found["state_dict_metadata"].items():
        if "size" not in entry.state:
            continue  # bytes: a number of steps, for example
        dtype = entry["properties"].state[0]
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise TypeError(f"the type of {name!r} is {dtype!r}")
        tensors[name] = torch.empty(_read_numbers(entry["size"]), dtype=dtype, device="meta")
        for chunk in entry["chunks"]:
            sizes[name, _read_numbers(chunk["offsets"])] = _read_numbers(chunk["sizes"])
    pieces: dict[str, list[_Piece]] = {name: [] for name in tensors}
    for index, place in found["storage_data"].items():
        name = index["fqn"]
        if name not in tensors:
            continue
        if place.state.get("transform_descriptors"):
            raise TypeError(f"{name} is compressed or encrypted")
        relative = PurePath(place["relative_path"])
        if relative.name != str(relative):
            raise TypeError(f"it names the file {relative}, which is not beside it")
        offsets = _read_numbers(index["offset"])
        start, length = _read_numbers((place["offset"], place["length"]))
        pieces[name].append(_Piece(folder / relative, start, length, offsets, sizes[name, offsets]))
    for name, value in tensors.items():
        covered = sum(torch.Size(piece.sizes).numel() for piece in pieces[name])
        if covered != value.numel() or not pieces[name]:
            raise KeyError(f"pieces of {name} are missing")
    return tensors, pieces


def _read_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise TypeError(f"expected sizes, got {numbers}")
    return numbers


def _read(
    tensors: Mapping[str, Tensor], pieces: Mapping[str, list[_Piece]], versions: Mapping[Path, FileVersion], name: str
) -> Tensor:
    with spent_on("read"):
        result = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        for piece in pieces[name]:
            versions[piece.file].check()
            value = _load_piece(piece)
            if value.shape != piece.sizes or value.dtype != result.dtype:
                raise ValueError(f"{name!r} in {piece.file} has another shape or type than {METADATA} says")
            ends = [start + size for start, size in zip(piece.offsets, piece.sizes, strict=True)]
            result[tuple(slice(start, end) for start, end in zip(piece.offsets, ends, strict=True))] = value
        return result


def _load_piece(piece: _Piece) -> Tensor:
    with piece.file.open("rb") as stream:
        stream.seek(piece.start)
        content = stream.read(piece.length)
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # its type depends on where the damage is
        raise ValueError(f"{piece.file} is damaged, or holds more than tensors: {type(error).__name__}") from None
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise ValueError(f"{piece.file} holds a {type(value).__name__} where a tensor is expected")
    return value.detach()


class _Record:
    """What stands in for an object of a class that the metadata may name."""

    state: Any = ()  # an object without any has none in the pickle

    def __init__(self, *values: Any):
        self.state = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def _ignore(*_: Any) -> None:
    return None


_FORMAT = "torch.distributed.checkpoint."
_RECORDS = {
    f"{_FORMAT}metadata": ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                           "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    f"{_FORMAT}filesystem": ("_StorageInfo",),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Builds records, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout") or module in ("pathlib", "pathlib._local"):
            return _ignore
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _read_metadata(file: Path) -> _Record:
    check_regular(file)
    with file.open("rb") as stream:
        content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{file} is larger than {MAX_JSON_BYTES / 1e6:.0f} MB")
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, _Record):
        raise TypeError(f"it holds a {type(found).__name__}")
    return found
