"""Open checkpoints for reading, tensor by tensor: safetensors, PyTorch files, shards, Hugging Face folders.

No code from a file is run: PyTorch files go through ``torch.load(weights_only=True)``, which refuses everything but
tensors and plain containers.
"""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.tensors.files import import_safetensors
from onebasin.tensors.states import LazyState

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
)
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module", "net", "ema")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How a checkpoint lies on disk.

    Attributes:
        path: the file or folder that was named.
        files: for each weight file, the names of the tensors in it.
        index: the file that tells which shard holds what, if there are shards.
        container: in a PyTorch file, the entry that holds the state dict; "" if it is the whole file.
        extras: in a PyTorch file, entries of the state dict that are no tensors.
        metadata: of each safetensors file.
    """

    path: Path
    files: Mapping[Path, tuple[str, ...]]
    index: Path | None = None
    container: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether a copy of it is a folder: it was one, or has several files."""
        return self.path.is_dir() or self.index is not None

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder it came from, with a configuration; None for other checkpoints."""
        return self.path if self.path.is_dir() and (self.path / "config.json").is_file() else None


class Checkpoint(LazyState):
    """A checkpoint on disk as a lazy state.

    Attributes:
        layout: its files.
        names: for each key the name of its tensor in the files: another where a prefix was taken off.
        notes: what a person should know about how it was read.
        original: under the names in the files, with all that is in them; itself if it was not renamed.
    """

    def __init__(
        self,
        shapes: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        layout: Layout,
        names: Mapping[str, str],
        notes: tuple[str, ...] = (),
        original: Checkpoint | None = None,
    ):
        super().__init__(shapes, read)
        self.layout, self.names, self.notes = layout, dict(names), notes
        self.original = original or self

    @property
    def dtypes(self) -> dict[str, int]:
        """How many entries there are of each type."""
        counts: dict[str, int] = {}
        for value in self.shapes.values():
            name = str(value.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + value.numel()
        return counts


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors or PyTorch file, an index of shards, or a folder with one of those.

    Raises:
        FileNotFoundError: if there is nothing there, or a shard is missing.
        ValueError: if it is damaged, empty, or holds more than tensors.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp(), "model.pt")
    >>> torch.save({"w": torch.zeros(2, 3)}, file)
    >>> open_checkpoint(file).shapes["w"].shape
    torch.Size([2, 3])
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    main = _weights_of_folder(path) if path.is_dir() else path
    if main.name.endswith(".index.json"):
        return _open_shards(path, main)
    _check_is_weights(main)
    return _open_torch(path, main) if _is_torch(main) else _open_safetensors(path, [main], None)


def _weights_of_folder(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"the folder {folder} holds no checkpoint: expected {', '.join(WEIGHT_FILES[:4])} or the like in it")


def _check_is_weights(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start:
        raise ValueError(f"{file} is empty")
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
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
        valid = bool(names) and all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of shards, or it is damaged: {_first_sentence(error)}") from None
    if not valid:
        raise ValueError(f"{index} is not an index of shards: its weight_map must name files beside it")
    files = [index.parent / name for name in names]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"the shard {file.name} is missing: {index} expects it beside itself")
        _check_is_weights(file)
    parts = [_open_torch(file, file) if _is_torch(file) else _open_safetensors(file, [file], None) for file in files]
    home: dict[str, Checkpoint] = {}
    for file, part in zip(files, parts, strict=True):
        for key in part:
            if weight_map.get(key) != file.name:
                raise ValueError(f"{file.name} holds {key!r}, which {index.name} does not place there")
            home[key] = part
    for key, name in weight_map.items():
        if key not in home:
            raise ValueError(f"{index.name} places {key!r} in {name}, which does not hold it")
    layout = Layout(
        path,
        {file: tuple(part) for file, part in zip(files, parts, strict=True)},
        index,
        metadata={file: part.layout.metadata.get(file, {}) for file, part in zip(files, parts, strict=True)},
    )
    shapes = {key: home[key].shapes[key] for key in weight_map}
    return Checkpoint(shapes, lambda key: home[key][key], layout, {key: key for key in shapes})


def _open_safetensors(path: Path, files: list[Path], index: Path | None) -> Checkpoint:
    (file,) = files
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except Exception as error:  # the library raises its own type, and plain ones for some kinds of damage
        raise ValueError(f"{file} is not a safetensors file, or it is damaged: {_first_sentence(error)}") from None
    for name, (dtype, _) in found.items():
        if dtype not in _DTYPES:
            raise ValueError(f"{name!r} in {file} has the type {dtype}, which PyTorch has no tensors of")
    if not found:
        raise ValueError(f"{file} holds no tensors")
    shapes = {name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta") for name, (dtype, shape) in found.items()}

    def read(name: str) -> Tensor:
        # Opened anew for each tensor: what is read stays mapped only as long as the tensor lives.
        with safetensors.safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    layout = Layout(path, {file: tuple(shapes)}, index, metadata={file: metadata})
    return Checkpoint(shapes, read, layout, {name: name for name in shapes})


def _open_torch(path: Path, file: Path) -> Checkpoint:
    content = load_plain(file)
    state, container, notes = _find_state(content, file)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    extras = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise ValueError(f"{file} is not a state dict: it has the key {key!r}")
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            raise ValueError(f"{key!r} in {file} is not a plain tensor but {value.layout}, {value.dtype}")
    shapes = {key: value.detach().to("meta") for key, value in tensors.items()}
    layout = Layout(path, {file: tuple(shapes)}, None, container, extras)
    read = functools.partial(_detached, tensors)
    return Checkpoint(shapes, read, layout, {key: key for key in shapes}, notes)


def _detached(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    return tensors[key].detach()


def load_plain(file: Path) -> Any:
    """The content of a PyTorch file of tensors and plain containers; nothing in it is run.

    Raises:
        ValueError: if it is damaged, or holds anything else.
    """
    try:
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            with zipfile.ZipFile(file) as archive:  # PyTorch itself trusts the sizes and checksums in it
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} in it is wrong")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
    except Exception as error:  # of many types, depending on where the damage is
        reason = str(error)
        if "weights_only" in reason or "Unsupported" in reason:
            raise ValueError(
                f"{file} is damaged, or holds more than tensors and would run code to be read, which is never done: "
                "save model.state_dict() in it"
            ) from None
        raise ValueError(f"{file} is not a PyTorch file, or it is damaged: {_first_sentence(error)}") from None


def _find_state(content: Any, file: Path) -> tuple[Mapping[Any, Any], str, tuple[str, ...]]:
    """The state dict in what a file held, and the entry it was in."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a state dict")
    if any(isinstance(value, Tensor) for value in content.values()):
        return content, "", ()
    for name in _CONTAINERS:
        inside = content.get(name)
        if isinstance(inside, Mapping) and any(isinstance(value, Tensor) for value in inside.values()):
            others = [str(key) for key in content if key != name]
            left = f"; {', '.join(others)} left out" if others else ""
            return inside, name, (f"the state dict is the entry {name!r} of {file.name}{left}",)
    raise ValueError(f"{file} holds no tensors, or no state dict that is known ({', '.join(_CONTAINERS)})")


def _first_sentence(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.partition(". ")[0].rstrip(".")
