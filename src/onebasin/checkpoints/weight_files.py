"""Write one weight file: safetensors tensor by tensor, large tensors in blocks of rows; or PyTorch's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch
from torch import Tensor

from onebasin.checkpoints.checkpoint import SAFETENSORS_TYPES, TORCH_ENDINGS, FileLayout
from onebasin.checkpoints.training_states import copy_tensors
from onebasin.tensors.files import write_torch
from onebasin.tensors.row_blocks import list_blocks
from onebasin.tensors.states import LazyState

_TYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


class Digest(Protocol):
    """A hash that is given content piece by piece."""

    def update(self, data: Any, /) -> None:
        """Take the next piece."""
        ...


def find_format(target: Path) -> Literal["safetensors", "torch"]:
    """The format of a file, by its ending.

    Raises:
        ValueError: if it names none.
    """
    if target.suffix == ".safetensors":
        return "safetensors"
    if target.suffix in TORCH_ENDINGS:
        return "torch"
    raise ValueError(f"cannot tell the format of {target}: it should end in .safetensors, {', '.join(TORCH_ENDINGS)}")


def write_safetensors(
    file: Path, tensors: LazyState, metadata: Mapping[str, str] | None, digest: Digest | None = None
) -> None:
    """Write the format directly, as the library would hold all tensors at once: header length, JSON header, tensors."""
    # The widest types first, so that every tensor begins at a multiple of its item size.
    ordered = sorted(tensors.shapes.items(), key=lambda entry: (-entry[1].dtype.itemsize, entry[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name, shape in ordered:
        if shape.dtype not in _TYPE_NAMES:
            raise ValueError(f"{name!r} has the type {shape.dtype}, which safetensors files have no name for")
        end = start + shape.nbytes
        header[name] = {"dtype": _TYPE_NAMES[shape.dtype], "shape": list(shape.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        _write_bytes(stream, len(text).to_bytes(8, "little") + text, digest)
        for name, shape in ordered:
            blocks = list_blocks(shape) if tensors.has_rows(name) else []
            if len(blocks) < 2:
                _write_tensor(stream, name, shape, tensors[name], digest)
                continue
            for start, stop in blocks:
                _write_tensor(stream, name, shape[start:stop], tensors.read_rows(name, start, stop), digest)


def _write_tensor(stream: BinaryIO, name: str, shape: Tensor, value: Tensor, digest: Digest | None = None) -> None:
    assert value.shape == shape.shape, f"{name} changed its shape"
    assert value.dtype == shape.dtype, f"{name} changed its type"
    flat = value.detach().cpu().contiguous().reshape(-1)
    _write_bytes(stream, flat.view(torch.uint8).numpy().data if flat.numel() else b"", digest)


def _write_bytes(stream: BinaryIO, content: Any, digest: Digest | None) -> None:
    stream.write(content)
    if digest is not None:
        digest.update(content)


def write_state(file: Path, tensors: LazyState, layout: FileLayout, entries: Mapping[Any, Any] | None) -> None:
    """PyTorch's own format. Its writer holds all tensors of a file at once."""
    # A view would be saved with its whole storage, which for a mapped file is all of the file.
    state: dict[str, Any] = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }
    state.update(layout.extras)
    if layout.container:
        state = {layout.container: state, **copy_tensors(entries or {})}
    write_torch(file, state)
