"""Distributed checkpoints: those of PyTorch (DCP) are read tensor by tensor; partitions of ZeRO are refused.

The file that says where tensors lie, ``.metadata``, is a pickle. No code in it is run: the few classes that it may name are
replaced by records, and everything else is refused. Tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import SAFETENSORS_TYPES, Checkpoint, FileLayout
from onebasin.checkpoints.file_versions import FileVersion
from onebasin.engines.clock import spent_on
from onebasin.tensors.files import MAX_JSON_BYTES, check_regular

METADATA = ".metadata"
_MAX_COMPARED = 256
"""Pieces of a tensor, each of which is compared with each other where they are more than stacked rows."""
CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt"
"""What makes an ordinary file of a distributed checkpoint."""
_ZERO = ("zero_pp_rank_*", "*/zero_pp_rank_*", "mp_rank_*", "*/mp_rank_*", "bf16_zero_pp_rank_*", "*/bf16_zero_pp_rank_*")
_SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")
"""Files of ``HuggingFaceStorageWriter(save_distributed=True)``: each has the rows of one process."""
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
    for entry in folder.iterdir():
        check_not_piece(entry)
    if inner := sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and is_distributed(entry)):
        raise ValueError(f"the checkpoint is a folder inside {folder}: give {folder / inner[0]}")


def check_not_piece(file: Path) -> None:
    """Refuse a file that holds pieces of tensors under the names of whole ones.

    Raises:
        ValueError: with the conversion to run.
    """
    if _SHARD.fullmatch(file.name):
        raise ValueError(
            f"{file} holds the rows of one process (HuggingFaceStorageWriter, save_distributed=True), not whole tensors: "
            "save with enable_consolidation=True, or run consolidate_safetensors_files of "
            "torch.distributed.checkpoint._consolidate_hf_safetensors on its folder"
        )


def is_distributed(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint of PyTorch."""
    return (folder / METADATA).is_file()


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, and where in which file it is.

    Attributes:
        file: the file.
        start: where in it the part begins.
        length: its bytes.
        offsets: where in the tensor it begins, along each axis.
        sizes: its extents.
        is_plain: whether it is there as plain numbers, not as a PyTorch file of its own.
    """

    file: Path
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_plain: bool = False

    def overlaps(self, other: _Piece) -> bool:
        """Whether an entry of the tensor is in both."""
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in spans)


def open_distributed(folder: Path) -> Checkpoint:
    """Open a distributed checkpoint of PyTorch; the state of an optimiser beside the model is left out.

    Raises:
        ValueError: if it is damaged, holds more than its format has, or a file is missing.
    """
    place = folder.absolute()  # workers have other working folders
    try:
        found = _read_metadata(place / METADATA)
        tensors, pieces = _find_tensors(place, found)
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
    pieces = _locate_plain(tensors, {name: pieces[name] for name in names})
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
        _check_cover(name, value, pieces[name])
    return tensors, pieces


def _check_cover(name: str, value: Tensor, pieces: Sequence[_Piece]) -> None:
    """Refuse pieces that leave a part of a tensor out, or have one twice."""
    for piece in pieces:
        ends = [start + size for start, size in zip(piece.offsets, piece.sizes, strict=True)]
        if len(ends) != value.dim() or any(end > size for end, size in zip(ends, value.shape, strict=True)):
            raise KeyError(f"a piece of {name} is not inside it")
    if sum(torch.Size(piece.sizes).numel() for piece in pieces) != value.numel() or not pieces:
        raise KeyError(f"pieces of {name} are missing")
    ordered = sorted((piece for piece in pieces if 0 not in piece.sizes), key=lambda piece: piece.offsets)
    if len(ordered) < 2 or _is_stack(ordered, value):
        return
    if len(ordered) > _MAX_COMPARED:
        raise KeyError(f"{name} has more pieces than are compared with each other")
    if any(first.overlaps(other) for first, other in itertools.combinations(ordered, 2)):
        raise KeyError(f"pieces of {name} overlap")


def _is_stack(ordered: Sequence[_Piece], value: Tensor) -> bool:
    """Whether pieces follow each other along the first axis, and are whole along all others."""
    ends = itertools.accumulate(piece.sizes[0] for piece in ordered)
    starts = [piece.offsets[0] for piece in ordered[1:]]
    return (
        value.dim() > 0 and starts == list(ends)[:-1] and all(piece.sizes[1:] == tuple(value.shape[1:]) for piece in ordered)
    )


def _locate_plain(tensors: Mapping[str, Tensor], pieces: Mapping[str, list[_Piece]]) -> dict[str, list[_Piece]]:
    """The pieces, those in safetensors format with the places of their numbers (SerializationFormat.SAFETENSORS)."""
    headers: dict[tuple[Path, int], tuple[int, Mapping[str, Any]] | None] = {}
    found: dict[str, list[_Piece]] = {}
    for name, some in pieces.items():
        found[name] = []
        for piece in some:
            place = (piece.file, piece.start)
            if place not in headers:
                headers[place] = _read_header(piece)
            header = headers[place]
            found[name].append(piece if header is None else _find_plain(name, tensors[name], piece, *header))
    return found


def _read_header(piece: _Piece) -> tuple[int, Mapping[str, Any]] | None:
    """Where the numbers begin, and what a safetensors header says about them; None if a PyTorch file is there."""
    with piece.file.open("rb") as stream:
        stream.seek(piece.start)
        start = stream.read(8)
        if start[:2] == b"PK":
            return None
        length = int.from_bytes(start, "little")
        try:
            if length > MAX_JSON_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is no object")
            return piece.start + 8 + length, header
        except ValueError as error:
            raise ValueError(f"{piece.file} is damaged, or holds more than tensors: {error}") from None


def _find_plain(name: str, value: Tensor, piece: _Piece, start: int, header: Mapping[str, Any]) -> _Piece:
    """A piece that is plain numbers in a safetensors file."""
    try:
        entry: Any = header[name]
        dtype, sizes = SAFETENSORS_TYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = _read_numbers(entry["data_offsets"])
        if (dtype, sizes, end - begin) != (value.dtype, piece.sizes, torch.Size(sizes).numel() * dtype.itemsize):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name!r} in {piece.file} has another shape or type than {METADATA} says") from None
    return replace(piece, start=start + begin, length=end - begin, is_plain=True)


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
            value = _load_plain(piece, result.dtype) if piece.is_plain else _load_piece(piece)
            if value.shape != piece.sizes or value.dtype != result.dtype:
                raise ValueError(f"{name!r} in {piece.file} has another shape or type than {METADATA} says")
            ends = [start + size for start, size in zip(piece.offsets, piece.sizes, strict=True)]
            result[tuple(slice(start, end) for start, end in zip(piece.offsets, ends, strict=True))] = value
        return result


def _load_plain(piece: _Piece, dtype: torch.dtype) -> Tensor:
    content = torch.empty(piece.length, dtype=torch.uint8)
    with piece.file.open("rb") as stream:
        stream.seek(piece.start)
        if stream.readinto(content.numpy().data) < piece.length:
            raise ValueError(f"{piece.file} is cut short")
    return content.view(dtype).reshape(piece.sizes)


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
