"""Write checkpoints in the layout of the one they came from, a shard and, where the format allows, a tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from onebasin.checkpoints.reading import _DTYPES, TORCH_ENDINGS, WEIGHT_FILES, Checkpoint
from onebasin.tensors.files import check_writable, write_atomically, write_folder_atomically

_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What `from_pretrained` and other readers of a folder need beside the weights.
_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_REPLACEABLE = (*_CARRIED, *TORCH_ENDINGS, ".safetensors")

Progress = Callable[[str, int, int], None]


def check_output(
    path: str | os.PathLike[str], like: Checkpoint, force: bool = False, inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Refuse, before any work, an output that cannot or should not be written.

    Raises:
        ValueError: if it is one of the inputs, exists and `force` is not given, has no folder to lie in, has an ending that
            the format does not fit, is a folder that holds other things, or there is too little room for it.
    """
    target = Path(path)
    for source in (like.layout.path, *map(Path, inputs)):
        place, other = target.resolve(), source.resolve()
        if place == other or other in place.parents or place in other.parents:
            raise ValueError(f"{target} is, or lies in, or holds the input {source}: inputs are never changed")
    check_writable(target, force, folder=like.layout.is_folder)
    if like.layout.is_folder and target.is_dir():
        for entry in target.iterdir():
            if not entry.is_file() or entry.suffix not in _REPLACEABLE:
                raise ValueError(f"{target} holds {entry.name}, which is not part of a checkpoint: give another folder")
    if not like.layout.is_folder:
        _format_of(target)
    existing = target
    while not existing.exists():
        existing = existing.absolute().parent
    free = shutil.disk_usage(existing).free
    if like.num_bytes > free:
        raise ValueError(f"{target} needs {like.num_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there")


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    like: Checkpoint,
    force: bool = False,
    progress: Progress | None = None,
    beside: Mapping[str, Callable[[Path], None]] | None = None,
) -> None:
    """Write a state with the names, files and format of the checkpoint it was made from.

    A folder keeps its shards, its index and, from a Hugging Face folder, the configuration and tokenizer files. A single
    file takes the format of its ending. What is written appears all at once, under its name, when it is complete.

    Args:
        path: a file, or for a folder of weights a folder.
        state: its keys are those of `like`; tensors are read one at a time. Other tensors of `like`'s files are copied.
        like: the checkpoint whose layout to use.
        force: replace what is there.
        progress: called with what is being done, how many tensors are written, and how many there are.
        beside: for a folder, further files to write into it, by name.
    """
    check_output(path, like, force)
    target = Path(path)
    tensors = _by_name(state, like)
    count = _Count(len(tensors), progress)
    if like.layout.is_folder:

        def write(folder: Path) -> None:
            _write_folder(folder, tensors, like, count)
            for name, write_file in (beside or {}).items():
                write_file(folder / name)

        write_folder_atomically(target, write, force)
        return
    (file,) = like.layout.files
    if _format_of(target) == "safetensors":
        metadata = like.layout.metadata.get(file) or {"format": "pt"}
        write_atomically(target, lambda temporary: _write_safetensors(temporary, tensors, metadata, count))
    else:
        write_atomically(target, lambda temporary: _write_torch(temporary, tensors, like, count))


class _Count:
    def __init__(self, total: int, progress: Progress | None):
        self.done, self.total, self.progress = 0, total, progress

    def step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress("writing", self.done, self.total)


Lazy = dict[str, tuple[Tensor, Callable[[], Tensor]]]
"""By name in the file: the shape as a meta tensor, and how to get the tensor."""


def _by_name(state: Mapping[str, Tensor], like: Checkpoint) -> Lazy:
    shapes = state.shapes if hasattr(state, "shapes") else state  # type: ignore[attr-defined]
    result: Lazy = {}
    for key, name in like.names.items():
        result.setdefault(name, (shapes[key], lambda key=key: state[key]))
    for name in (n for names in like.layout.files.values() for n in names):
        if name not in result:
            result[name] = (like.original.shapes[name], lambda name=name: like.original[name])
    return result


def _write_folder(folder: Path, tensors: Lazy, like: Checkpoint, count: _Count) -> None:
    source = like.layout.path
    if source.is_dir():
        skipped = {*WEIGHT_FILES, *(file.name for file in like.layout.files)}
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix in _CARRIED and file.name not in skipped:
                shutil.copyfile(file, folder / file.name)
    for file, names in like.layout.files.items():
        part = {name: tensors[name] for name in names}
        if _is_safetensors(file):
            _write_safetensors(folder / file.name, part, like.layout.metadata.get(file) or {"format": "pt"}, count)
        else:
            _write_torch(folder / file.name, part, like, count)
    if like.layout.index is not None:
        index = json.loads(like.layout.index.read_text())
        total = sum(shape.nbytes for shape, _ in tensors.values())
        index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
        (folder / like.layout.index.name).write_text(json.dumps(index, indent=2) + "\n")


def _is_safetensors(file: Path) -> bool:
    return file.suffix not in TORCH_ENDINGS


def _format_of(target: Path) -> str:
    if target.suffix == ".safetensors":
        return "safetensors"
    if target.suffix in TORCH_ENDINGS:
        return "torch"
    raise ValueError(f"cannot tell the format of {target}: it should end in .safetensors, {', '.join(TORCH_ENDINGS)}")


def _write_safetensors(file: Path, tensors: Lazy, metadata: Mapping[str, str], count: _Count) -> None:
    """The format itself, since the library would hold all tensors at once: length of header, JSON header, tensors."""
    # The widest types first, so that every tensor begins at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda entry: (-entry[1][0].dtype.itemsize, entry[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (shape, _) in ordered:
        if shape.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name!r} has the type {shape.dtype}, which safetensors files have no name for")
        end = start + shape.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[shape.dtype], "shape": list(shape.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, read) in ordered:
            _write_tensor(stream, name, shape, read())
            count.step()


def _write_tensor(stream: BinaryIO, name: str, shape: Tensor, value: Tensor) -> None:
    assert value.shape == shape.shape, f"{name} changed its shape"
    assert value.dtype == shape.dtype, f"{name} changed its type"
    flat = value.detach().cpu().contiguous().reshape(-1)
    stream.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _write_torch(file: Path, tensors: Lazy, like: Checkpoint, count: _Count) -> None:
    """PyTorch's own format; its writer holds all tensors of a file at once."""
    state: dict[str, Any] = {}
    for name, (_, read) in tensors.items():
        value = read().detach().cpu()
        # A view would take its whole storage along, which for a mapped file is all of it.
        state[name] = value.clone(memory_format=torch.contiguous_format)
        count.step()
    state.update(like.layout.extras)
    torch.save({like.layout.container: state} if like.layout.container else state, file)
