"""Running operations in float64, so that rounding errors cannot be taken for a wrong axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from onebasin.torch_internals import GROUPED_MM, TorchDispatchMode

_WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
_WIDE |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)


def promote(value: Any) -> Any:
    """Convert a floating or complex tensor, or its type, to 64 bits a number; leave anything else as it is."""
    if isinstance(value, Tensor):
        wide = _WIDE.get(value.dtype)
        return value if wide is None else value.to(wide)
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, torch.Generator):  # draws the same numbers every time, and leaves the user's generator alone
        return torch.Generator(value.device).manual_seed(0)
    return value


STATISTICS_NORMS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
"""Norms that update their running statistics in train mode, although their schemas do not say so."""


def compute_on_copies(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; a norm that updates its running statistics updates copies of them."""
    if operation in STATISTICS_NORMS and args[5]:
        args = (*args[:3], *(value if value is None else value.clone() for value in args[3:5]), *args[5:])
    return operation(*args, **kwargs)


def _multiply_groups(rows: Tensor, weights: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """Rows up to each offset times the matrix of their group. PyTorch's kernels are for types of at most 32 bits."""
    result = rows.new_zeros(rows.shape[0], weights.shape[2])
    start = 0
    for end, weight in zip(offs.tolist(), weights, strict=True):
        result[start:end] = rows[start:end] @ weight
        start = end
    return result


def compute_in_float64(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with its operands, every floating type that it names, and its results promoted."""
    if operation is torch.ops.aten.view.default:  # attention in float64 may return other strides than were recorded
        operation = torch.ops.aten.reshape.default
    args, kwargs = map_aggregate((args, kwargs), promote)
    if operation is GROUPED_MM and (args[0].dim(), args[1].dim()) == (2, 3):
        operation = _multiply_groups
    return map_aggregate(compute_on_copies(operation, args, kwargs), promote)


class Float64(TorchDispatchMode):
    """Runs all operations in float64, including casts and new tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute_in_float64(func, args, kwargs or {})
