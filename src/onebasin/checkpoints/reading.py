"""Open checkpoints for reading, tensor by tensor: safetensors, PyTorch files, shards, Hugging Face folders, DCP.

No code from a file is run: PyTorch files are read by ``torch.load(weights_only=True)``, which refuses everything but
tensors and plain containers.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import (
    SAFETENSORS_TYPES,
    TORCH_ENDINGS,
    WEIGHT_FILES,
    Checkpoint,
    FileLayout,
    join_parts,
)
from onebasin.checkpoints.distributed import check_not_piece, check_partitions, is_distributed, open_distributed
from onebasin.checkpoints.file_versions import FileVersion
from onebasin.checkpoints.mirrors import mirror
from onebasin.checkpoints.pipeline_parts import find_parts
from onebasin.checkpoints.remote_files import RemoteFile, is_remote, write_url
from onebasin.engines.clock import spent_on
from onebasin.tensors.files import check_nesting, check_regular, read_json
from onebasin.tensors.states import RowReader

_CONTAINERS = ("state_dict", "model_state_dict", "model", "module", "net", "ema")
"""Entries of a PyTorch file in which a state dict is looked for."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors or PyTorch file, an index of shards, a folder with one of those, or a pipeline of such folders.

    A distributed checkpoint of PyTorch (a folder with ``.metadata`` and ``.distcp`` files) is read, too. So are safetensors
    in object stores, by byte ranges, if `path` is a URL that fsspec reads, such as ``s3://bucket/folder``: the small files
    beside them are copied into a temporary folder.

    Raises:
        FileNotFoundError: if there is nothing there, or a shard is missing.
        ValueError: if it is damaged, empty, or holds more than tensors.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from onebasin.checkpoints import open_checkpoint
    >>> file = Path(tempfile.mkdtemp(), "model.pt")
    >>> torch.save({"w": torch.zeros(2, 3)}, file)
    >>> open_checkpoint(file).shapes["w"].shape
    torch.Size([2, 3])
    """
    if is_remote(path):
        return _open_remote(write_url(path))
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if parts := find_parts(path):
        models = {name: _open(path / name) for name, part in parts.items() if part.has_weights}
        layouts = {name: models[name].layout if name in models else FileLayout(path / name, {}) for name in parts}
        files = {
            file: tuple(f"{name}.{key}" for key in names)
            for name, model in models.items()
            for file, names in model.layout.files.items()
        }
        return join_parts(FileLayout(path, files, parts=layouts), models)
    return _open(path)


def _open_remote(url: str) -> Checkpoint:
    with mirror(url) as found:
        opened = _open(found.path)
        files = opened.layout.files
        readers = {file: _SafetensorsReader(found.files[file], _find_starts(file), opened.shapes) for file in files}
    read = _RemoteReader({name: readers[file] for file, names in files.items() for name in names})
    notes = (*opened.notes, f"read from {url} by byte ranges")
    return Checkpoint(opened.shapes, read, replace(opened.layout, origins=found.files), notes=notes)


def _open(path: Path) -> Checkpoint:
    place = path.absolute()  # workers have other working folders
    if place.is_dir() and is_distributed(place):
        return open_distributed(path)
    file = _find_weights(path).absolute() if place.is_dir() else place
    return _open_shards(path, file) if file.name.endswith(".index.json") else _open_file(path, file)


def _open_file(path: Path, file: Path) -> Checkpoint:
    _check_is_weights(file)
    return _open_torch(path, file) if _is_torch(file) else _open_safetensors(path, file)


def _find_weights(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    check_partitions(folder)
    files = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", *TORCH_ENDINGS))
    hint = f"; if its file {files[0]} is one, give that" if files else ""
    raise ValueError(
        f"the folder {folder} holds no checkpoint: expected {', '.join(WEIGHT_FILES[:4])} or the like in it{hint}"
    )


def _check_is_weights(file: Path) -> None:
    check_regular(file)
    if not file.stat().st_size:  # so are files of /proc, from which much can be read
        raise ValueError(f"{file} is empty")
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file} is a Git LFS pointer, not the weights themselves: fetch them with `git lfs pull`")


def _is_torch(file: Path) -> bool:
    if file.suffix in TORCH_ENDINGS:
        return True
    if file.suffix == ".safetensors":
        return False
    with file.open("rb") as stream:
        return stream.read(2) in (b"PK", b"\x80\x02")


def _open_shards(path: Path, index: Path) -> Checkpoint:
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        valid = bool(names) and all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards, or it is damaged: {_first_sentence(error)}") from None
    if not valid:
        raise ValueError(f"{index} is not an index of shards: its weight_map must name files beside it")
    files = [index.parent / name for name in names]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"the shard {file.name} is missing: {index} expects it beside itself")
    shards = {file: _open_file(file, file) for file in files}
    shard_of: dict[str, Checkpoint] = {}
    for file, shard in shards.items():
        for key in shard:
            if weight_map.get(key) != file.name:
                raise ValueError(f"{file.name} holds {key!r}, which {index.name} does not place there")
            shard_of[key] = shard
    for key, name in weight_map.items():
        if key not in shard_of:
            raise ValueError(f"{index.name} places {key!r} in {name}, which does not hold it")
    contents = {file: tuple(shard) for file, shard in shards.items()}
    metadata = {file: shard.layout.metadata.get(file, {}) for file, shard in shards.items()}
    shapes = {key: shard_of[key].shapes[key] for key in weight_map}
    layout = FileLayout(path, contents, index, metadata=metadata)
    return Checkpoint(shapes, _ShardReader(shard_of), layout)


@dataclass(frozen=True)
class _ShardReader(RowReader):
    shard_of: Mapping[str, Checkpoint]

    def __call__(self, key: str) -> Tensor:
        return self.shard_of[key][key]

    def has_rows(self, key: str) -> bool:
        return self.shard_of[key].has_rows(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.shard_of[key].read_rows(key, start, stop)


def _open_safetensors(path: Path, file: Path) -> Checkpoint:
    check_not_piece(file)
    version = FileVersion.of(file)
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {name: (value.get_dtype(), value.get_shape()) for name, value in slices.items()}
        starts = _find_starts(file)
    except Exception as error:  # the library raises an exception of its own, and built-in ones for some kinds of damage
        raise ValueError(f"{file} is not a safetensors file, or it is damaged: {_first_sentence(error)}") from None
    for name, (dtype, _) in found.items():
        if dtype not in SAFETENSORS_TYPES:
            raise ValueError(f"{name!r} in {file} has the type {dtype}, which PyTorch has no tensors of")
    if not found:
        raise ValueError(f"{file} holds no tensors")
    shapes = {
        name: torch.empty(shape, dtype=SAFETENSORS_TYPES[dtype], device="meta") for name, (dtype, shape) in found.items()
    }

    read = _SafetensorsReader(version, starts, shapes)
    return Checkpoint(shapes, read, FileLayout(path, {file: tuple(shapes)}, metadata={file: metadata}))


def _find_starts(file: Path) -> dict[str, int]:
    """Where in a safetensors file each tensor begins: behind the length of the header and the header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length), object_pairs_hook=_read_once)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The entries of a JSON object. Readers differ in which of two entries with one name they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header has an entry twice")
    return found


@dataclass(frozen=True)
class _SafetensorsReader(RowReader):
    """Reads tensors of a safetensors file, or rows of them.

    Attributes:
        version: of the file, which must not change.
        starts: where in it each tensor begins.
        shapes: of the tensors.
    """

    version: FileVersion | RemoteFile
    starts: Mapping[str, int]
    shapes: Mapping[str, Tensor]

    def __call__(self, key: str) -> Tensor:
        return self._read(self.starts[key], self.shapes[key])

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        rows = self.shapes[key][start:stop]
        return self._read(self.starts[key] + start * self.shapes[key][:1].nbytes, rows)

    def _read(self, start: int, shape: Tensor) -> Tensor:
        """Bytes of the file, copied: a tensor in a mapped file would end the process if the file became shorter."""
        with spent_on("read"):
            self.version.check()
            content = torch.empty(shape.nbytes, dtype=torch.uint8)
            self.version.read(start, content.numpy().data)
            return content.view(shape.dtype).reshape(shape.shape)


@dataclass(frozen=True)
class _RemoteReader(RowReader):
    readers: Mapping[str, _SafetensorsReader]

    def __call__(self, key: str) -> Tensor:
        return self.readers[key](key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.readers[key].read_rows(key, start, stop)


def _open_torch(path: Path, file: Path) -> Checkpoint:
    version, content = FileVersion.of(file), load_plain(file)
    container = _find_container(content, file)
    state = content[container] if container else content
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    extras = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise ValueError(f"{file} is not a state dict: it has the key {key!r}")
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            raise ValueError(f"{key!r} in {file} is not a plain tensor but {value.layout}, {value.dtype}")
    shapes = {key: value.detach().to("meta") for key, value in tensors.items()}

    def read_others() -> Mapping[Any, Any]:
        version.check()
        return {key: value for key, value in content.items() if key != container} if container else {}

    layout = FileLayout(path, {file: tuple(shapes)}, container=container, extras=extras, read_others=read_others)
    notes = (f"the state dict is the entry {container!r} of {file.name}",) if container else ()
    return Checkpoint(shapes, _TorchFile(version, container, tensors), layout, notes=notes)


class _TorchFile(RowReader):
    """Reads tensors of a PyTorch file, which is mapped. In another process it is opened again, at the first tensor."""

    def __init__(self, version: FileVersion, container: str, tensors: Mapping[str, Tensor] | None = None):
        self.version, self.container, self.tensors = version, container, tensors

    def __call__(self, key: str) -> Tensor:
        self.version.check()
        if self.tensors is None:  # the version is one whose checksums have been looked at
            content = load_plain(self.version.file, verify=False)
            self.tensors = content[self.container] if self.container else content
        return self.tensors[key].detach()

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self(key)[start:stop]

    def __reduce__(self) -> Any:
        return _TorchFile, (self.version, self.container)


def load_plain(file: Path, verify: bool = True) -> Any:
    """The content of a PyTorch file that holds tensors and plain containers. No code in it is run.

    Args:
        file: to read.
        verify: compare all of it with its checksums, for which it is read once.

    Raises:
        ValueError: if the file is damaged, or holds anything else.
    """
    _check_is_weights(file)
    try:
        is_zip = zipfile.is_zipfile(file)
        if is_zip and verify:
            with zipfile.ZipFile(file) as archive:  # PyTorch does not check the checksums
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} in it is wrong")
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
    except Exception as error:  # its type depends on where the damage is
        reason = str(error)
        if "weights_only" in reason or "Unsupported" in reason:
            raise ValueError(
                f"{file} is damaged, or holds more than tensors and would run code to be read, which is never done: "
                "save model.state_dict() in it"
            ) from None
        detail = "" if isinstance(error, KeyError) else f": {_first_sentence(error)}"  # of a key nothing but itself is said
        raise ValueError(f"{file} is not a PyTorch file, or it is damaged{detail}") from None
    if isinstance(content, Mapping):
        check_nesting(content, file)
    return content


def _find_container(content: Any, file: Path) -> str:
    """The name of the entry that holds the state dict; "" if the content is one itself."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a state dict")
    for name in _CONTAINERS:
        inside = content.get(name)
        if isinstance(inside, Mapping) and any(isinstance(value, Tensor) for value in inside.values()):
            return name
    if any(isinstance(value, Tensor) for value in content.values()):
        return ""
    raise ValueError(f"{file} holds no tensors, or no state dict that is known ({', '.join(_CONTAINERS)})")


def _first_sentence(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.partition(". ")[0].rstrip(".")
