"""From values to bytes for another process, and back.

Lazy states travel without their tensors: as paths, places in files, and what is done to a tensor after it is read. Values
that many tasks need are replaced by tokens, so that each worker is sent them once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onebasin.tensors.states import LazyState, State

_MOST_BYTES = 2**24
"""Of one tensor that a lazy state may hold itself, such as positions that a model makes: 17 MB."""
_NOT_PORTABLE = (
    "workers read files themselves, and {why}: give checkpoints, as onebasin.checkpoints.open_checkpoint opens them, or "
    "take engine='local'"
)


def check_portable(state: State, what: str) -> None:
    """Refuse a state that workers cannot read by themselves.

    Args:
        state: any state.
        what: what messages call it.

    Raises:
        ValueError: if it is in memory, or read by a function that cannot be sent to another process.
    """
    if not state.is_lazy:
        raise ValueError(_NOT_PORTABLE.format(why=f"{what} is in memory"))
    try:
        _Packer(io.BytesIO(), {}, _MOST_BYTES).dump(state)
    except _TooLargeError:
        raise ValueError(_NOT_PORTABLE.format(why=f"{what} holds tensors in memory")) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"{what} is read by a function that cannot be sent to them ({error})"
        raise ValueError(_NOT_PORTABLE.format(why=why)) from None


def pack(value: Any, tokens: Mapping[int, str] | None = None) -> tuple[bytes, list[str]]:
    """Bytes of a value, and the tokens in them.

    Args:
        value: made of plain values, tensors, lazy states, and functions that are known by their names.
        tokens: for the ids of values that are sent on their own, what stands for them. The value itself is not replaced.
    """
    stream = io.BytesIO()
    packer = _Packer(stream, {each: token for each, token in (tokens or {}).items() if each != id(value)})
    packer.dump(value)
    return stream.getvalue(), packer.used


def unpack(content: bytes | bytearray, fetch: Callable[[str], Any] | None = None) -> Any:
    """The value that `pack` was given; `fetch` finds those that tokens stand for."""
    return _Unpacker(io.BytesIO(content), fetch).load()


class _TooLargeError(Exception):
    """A tensor is too large to be sent."""


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tokens: Mapping[int, str], most_bytes: float = float("inf")):
        super().__init__(stream, protocol=5)
        self.tokens, self.most_bytes = tokens, most_bytes
        self.used: list[str] = []

    def persistent_id(self, obj: Any) -> Any:
        token = self.tokens.get(id(obj))
        if token is not None and token not in self.used:
            self.used.append(token)
        return token

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, LazyState):  # of a checkpoint, what its files are stays behind
            return LazyState, (obj.shapes, obj.read, obj.device)
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_meta:
            return _make_meta, (tuple(obj.shape), obj.dtype)
        if obj.nbytes > self.most_bytes:
            raise _TooLargeError
        flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _make_tensor, (tuple(obj.shape), obj.dtype, pickle.PickleBuffer(flat.numpy().data))


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, fetch: Callable[[str], Any] | None):
        super().__init__(stream)
        self.fetch = fetch

    def persistent_load(self, pid: Any) -> Any:
        assert self.fetch is not None
        return self.fetch(pid)


def _make_meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _make_tensor(shape: tuple[int, ...], dtype: torch.dtype, content: bytearray | bytes) -> Tensor:
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    writable = content if isinstance(content, bytearray) else bytearray(content)
    return torch.frombuffer(writable, dtype=torch.uint8).view(dtype).reshape(shape)
