"""Everything in float64: rounding must not hide a wrong axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode


def promote(value: Any) -> Any:
    """A floating tensor, or the name of a floating type, in float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def compute_in_float64(operation: Any, args: Any, kwargs: Any) -> Any:
    """An operation with its operands, every floating type that it names, and its results promoted."""
    if operation is torch.ops.aten.view.default:  # attention in float64 may return other strides than were recorded
        operation = torch.ops.aten.reshape.default
    args, kwargs = map_aggregate((args, kwargs), promote)
    return map_aggregate(operation(*args, **kwargs), promote)


class Float64(TorchDispatchMode):
    """Within it all operations are done in float64, casts and new tensors included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute_in_float64(func, args, kwargs or {})
