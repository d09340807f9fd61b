"""Types of written tensors: those of the input, or another one for all floating tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from onebasin.tensors.states import LazyState, RowReader, State

TypeName = Literal["float64", "float32", "float16", "bfloat16"]
_ENTRIES = ("torch_dtype", "dtype")
"""Entries of a configuration that tell the type of the weights, in older and newer versions of transformers."""


def find_type(name: TypeName | None) -> torch.dtype | None:
    """A type by its name; None for none.

    >>> find_type("bfloat16")
    torch.bfloat16
    """
    return None if name is None else getattr(torch, name)


def convert_types(tensors: State, dtype: torch.dtype) -> LazyState:
    """The same tensors, those of floating type in another type. Each is converted when it is read.

    Raises:
        ValueError: at the first tensor that holds numbers too large for the type, when it is read.
    """
    shapes = {name: shape.to(dtype) if shape.is_floating_point() else shape for name, shape in tensors.shapes.items()}
    return convert_to(tensors, shapes)


@dataclass(frozen=True)
class _ReadAs(RowReader):
    tensors: LazyState
    shapes: Mapping[str, Tensor]

    def __call__(self, key: str) -> Tensor:
        return convert_tensor(key, self.tensors[key], self.shapes[key].dtype)

    def has_rows(self, key: str) -> bool:
        return self.tensors.has_rows(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return convert_tensor(key, self.tensors.read_rows(key, start, stop), self.shapes[key].dtype)


def convert_to(tensors: State, shapes: Mapping[str, Tensor]) -> LazyState:
    """The same tensors in the types of others of the same names. Each is converted when it is read."""
    return LazyState(shapes, _ReadAs(tensors.lazily(), shapes))


def convert_tensor(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type.

    Raises:
        ValueError: with its name, if it holds finite numbers that are infinite in the type.
    """
    converted = value.to(dtype)
    overflows = converted.is_floating_point() and not bool(converted.isfinite().all())
    if overflows and not torch.equal(converted.isfinite(), value.double().isfinite()):
        raise ValueError(f"{name!r} holds numbers that are too large for {dtype}: take a wider type")
    return converted


def widen(state: LazyState) -> LazyState:
    """The same tensors in the type to compute in, at least float32, so that a result is rounded once, at the end."""
    return state.to(state.device, state.dtype)


def widen_to(state: LazyState, dtype: torch.dtype | None) -> LazyState:
    """The same tensors in the type to compute in if they are written in another type: float64 is computed in as well."""
    return state.to(state.device, torch.float64) if dtype == torch.float64 else widen(state)


def convert_configuration(content: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A configuration, in which entries that tell the type of the weights tell another one.

    >>> convert_configuration({"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "width": 8}, torch.float16)
    {'torch_dtype': 'float16', 'text_config': {'dtype': 'float16'}, 'width': 8}
    """
    name = str(dtype).removeprefix("torch.")

    def convert(key: str, value: Any) -> Any:
        if isinstance(value, Mapping) and key != "quantization_config":
            return {inner: convert(inner, entry) for inner, entry in value.items()}
        return name if key in _ENTRIES and value in get_args(TypeName) else value

    return {key: convert(key, value) for key, value in content.items()}
