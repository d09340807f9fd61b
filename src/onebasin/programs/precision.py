"""Everything in float64: rounding must not hide a wrong axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from onebasin.torch_internals import TorchDispatchMode


def promote(value: Any) -> Any:
    """A floating tensor, or the name of a floating type, in float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.Generator):  # the same numbers every time, and none of the user's
        return torch.Generator(value.device).manual_seed(0)
    return value


UPDATING = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
"""In training mode they write their statistics, which their schemas do not tell."""


def compute_in_float64(operation: Any, args: Any, kwargs: Any) -> Any:
    """An operation with its operands, every floating type that it names, and its results promoted."""
    if operation is torch.ops.aten.view.default:  # attention in float64 may return other strides than were recorded
        operation = torch.ops.aten.reshape.default
    args, kwargs = map_aggregate((args, kwargs), promote)
    if operation in UPDATING and args[5]:
        args = (*args[:3], *(value if value is None else value.clone() for value in args[3:5]), *args[5:])
    return map_aggregate(operation(*args, **kwargs), promote)


class Float64(TorchDispatchMode):
    """Within it all operations are done in float64, casts and new tensors included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute_in_float64(func, args, kwargs or {})
