"""Running operations in float64, so that rounding errors cannot be taken for a wrong axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from onebasin.torch_internals import GROUPED_MM, TorchDispatchMode

_WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
_NUMBERS = {int, float, bool, type(None)}
_WIDE |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)


def promote(value: Any) -> Any:
    """Convert a floating or complex tensor, or its type, to 64 bits a number; leave anything else as it is."""
    if type(value) in _NUMBERS:  # most arguments; what follows takes longer
        return value
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


_SMALL_MAP = 32 * 32
"""Up to this many positions, a sum over the entries of a depthwise kernel is faster than PyTorch's float64 convolution."""


def _is_depthwise(inputs: Tensor, weight: Tensor, *options: Any) -> bool:
    """Whether a convolution has a kernel of its own for each channel of a small map."""
    is_image = inputs.dim() == 4 and inputs.shape[2:].numel() <= _SMALL_MAP and min(inputs.shape) > 0
    return is_image and len(options) == 5 and options[4] == inputs.shape[1] == weight.shape[0] > 1


def _convolve_channels(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], _: int
) -> Tensor:
    """A depthwise convolution, as a sum over the entries of the kernel with the channels innermost.

    PyTorch takes the channels one by one, up to twenty times slower.
    """
    (step, step_x), (high, wide), (apart, apart_x) = (2 * n if len(n) == 1 else n for n in (stride, padding, dilation))
    maps = torch.nn.functional.pad(inputs.movedim(1, 3), (0, 0, wide, wide, high, high))
    rows = range(0, maps.shape[1] - apart * (weight.shape[2] - 1), step)
    columns = range(0, maps.shape[2] - apart_x * (weight.shape[3] - 1), step_x)
    result = maps.new_zeros(maps.shape[0], len(rows), len(columns), maps.shape[3])
    for i, kernel in enumerate(weight[:, 0].permute(1, 2, 0).contiguous()):
        for j, entry in enumerate(kernel):
            shifted = maps[:, i * apart :, j * apart_x :]
            result.addcmul_(shifted[:, : rows.stop : step, : columns.stop : step_x], entry)
    if bias is not None:
        result += bias
    return result.movedim(3, 1).contiguous()


def compute_in_float64(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with its operands, every floating type that it names, and its results promoted."""
    if operation is torch.ops.aten.view.default:  # attention in float64 may return other strides than were recorded
        operation = torch.ops.aten.reshape.default
    args, kwargs = map_aggregate((args, kwargs), promote)
    if operation is GROUPED_MM and (args[0].dim(), args[1].dim()) == (2, 3):
        operation = _multiply_groups
    if operation is torch.ops.aten.conv2d.default and _is_depthwise(*args):
        operation = _convolve_channels
    return map_aggregate(compute_on_copies(operation, args, kwargs), promote)


class Float64(TorchDispatchMode):
    """Runs all operations in float64, including casts and new tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute_in_float64(func, args, kwargs or {})
