"""What an operation returns, without computing it: shapes, strides, types, and whose memory it shares or writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from onebasin.programs.failures import ModuleFails, NeedsValues, NotRecordable, describe_error
from onebasin.torch_internals import GROUPED_MM, find_schema, memory_id, overload_name

_META = torch.device("meta")


class Shapes:
    """Remembers results by the shapes of the operands, because layers repeat."""

    def __init__(self) -> None:
        self._metas: dict[Any, Tensor] = {}
        self._returned: dict[Any, tuple[Any, list[int | None]]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor without memory that stands for all tensors of this shape, these strides and this type."""
        key = (tensor.size(), tensor.stride(), tensor.dtype)
        if key not in self._metas:
            self._metas[key] = make_empty(tensor)
        return self._metas[key]

    def compute(self, func: Any, nodes: Any) -> tuple[Any, list[int | None]]:
        """Infer what an operation returns, and for each result the number of the operand whose memory it shares.

        The nodes among its arguments have their shapes in ``meta["val"]``.
        """
        key = (func, _freeze(nodes))
        if key not in self._returned:
            operands: list[Tensor] = []

            def convert(value: Any) -> Any:
                if isinstance(value, torch.device):
                    return _META
                if isinstance(value, torch.Generator):
                    return None
                operands.append(make_empty(value.meta["val"]))  # memory of its own, so that views can be recognised
                return operands[-1]

            args, kwargs = map_leaves(nodes, (Node, torch.device, torch.Generator), convert)
            found = _infer_common(func, *args) if args and not kwargs else None
            found = _infer_grouped(*args, **kwargs) if func is GROUPED_MM else found
            if found is None:
                found = _run_without_values(func, args, kwargs)
            results = [found] if isinstance(found, Tensor) else found
            if not isinstance(results, (list, tuple)) or not all(r is None or isinstance(r, Tensor) for r in results):
                raise NotRecordable(f"{func} returns something else than tensors")
            if any(r is not None and r.layout != torch.strided for r in results):
                raise NotRecordable(f"{func} returns a sparse tensor")
            owners = {memory_id(operand): number for number, operand in reversed(list(enumerate(operands)))}
            shared = [None if r is None else owners.get(memory_id(r)) for r in results]
            self._returned[key] = map_leaves(found, Tensor, self.of), shared
        return self._returned[key]


def _run_without_values(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        return func(*args, **kwargs)
    except Exception as error:
        # Some operations need values to infer a shape; then it is not the module's fault.
        needs_values = isinstance(error, NotImplementedError) or "meta" in str(error).lower()
        kind = NeedsValues if needs_values else ModuleFails
        raise kind(f"{func} failed: {describe_error(error)}") from error


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of the module on values; if it fails, the module does."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        raise ModuleFails(f"{func} failed: {describe_error(error)}") from error


def map_leaves(value: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Replace everything of these kinds inside of lists, tuples and dicts."""
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, (list, tuple)):
        found = [map_leaves(v, kinds, function) for v in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: map_leaves(v, kinds, function) for key, v in value.items()}
    return value


def iterate_leaves(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dicts hold, in order."""
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from iterate_leaves(entry)
    elif isinstance(value, dict):
        yield from iterate_leaves(list(value.values()))
    else:
        yield value


def _freeze(value: Any) -> Any:
    """A key that two values share only if an operation treats them alike; 1 and 1.0 have different keys."""
    if isinstance(value, Node):
        return id(value.meta["val"])
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(v)) for key, v in value.items())
    return type(value), value


def is_exact(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or booleans, which are not rounded."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def make_empty(like: Tensor, device: torch.device = _META) -> Tensor:
    """A tensor of the same shape, strides and type, without values; on the meta device also without memory."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)


_SHAPE_PRESERVING = {getattr(torch.ops.aten, name).default for name in ("relu", "gelu", "silu", "tanh", "sigmoid")}


def _infer_common(func: Any, inputs: Any, *others: Any) -> Tensor | None:
    """Results of the most common operations; None for other operations and unusual operands.

    PyTorch takes up to a millisecond to infer these itself.
    """
    if func in _SHAPE_PRESERVING and inputs.is_floating_point() and _is_dense(inputs):
        return make_empty(inputs)
    if func is torch.ops.aten.linear.default:
        weight, *bias = others
        fits = weight.dim() == 2 and inputs.dim() > 0 and inputs.shape[-1] == weight.shape[1]
        fits &= all(b is None or (b.shape, b.dtype) == (weight.shape[:1], weight.dtype) for b in bias)
        if fits and inputs.dtype == weight.dtype:
            return torch.empty((*inputs.shape[:-1], weight.shape[0]), dtype=inputs.dtype, device=_META)
    if func is torch.ops.aten.batch_norm.default and inputs.dim() > 1:
        weight, bias, mean, variance, uses_batch = others[:5]
        fits = all(v is None or v.shape == inputs.shape[1:2] for v in (weight, bias, mean, variance))
        fits &= bool(uses_batch) or (mean is not None and variance is not None)
        made = make_empty(inputs) if _is_dense(inputs) else torch.empty(inputs.shape, dtype=inputs.dtype, device=_META)
        return made if fits else None
    return None


def _infer_grouped(
    rows: Tensor, weights: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """The result of rows times one matrix per group: each row begins at a multiple of 16 bytes. None for other operands.

    Without values PyTorch takes bfloat16 alone.
    """
    fits = rows.dim() == 2 and weights.dim() == 3 and rows.shape[1] == weights.shape[1] and rows.dtype == weights.dtype
    if not fits or offs is None or bias is not None or out_dtype not in (None, rows.dtype):
        return None
    num_columns, alignment = weights.shape[2], 16 // rows.dtype.itemsize
    stride = -(-num_columns // alignment) * alignment
    return torch.empty_strided((rows.shape[0], num_columns), (stride, 1), dtype=rows.dtype, device=_META)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has neither gaps nor repetition, so that a result has the strides of its operand."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def bind_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema, defaults filled in."""
    arguments = find_schema(node.target).arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments}


@functools.cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operation writes."""
    arguments = find_schema(func).arguments if find_schema(func).is_mutable else ()
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def functional_variant(func: Any) -> Any:
    """The operation that returns what this one writes, such as relu for relu_; None if there is none."""
    name = find_schema(func).name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    if packet is None:
        return None
    names = [overload_name(func), *packet.overloads()]  # pow_.Scalar writes what pow.Tensor_Scalar returns
    variants = (getattr(packet, name) for name in names if name in packet.overloads())
    return next((v for v in variants if _list_arguments(v) == _list_arguments(func)), None)


def _list_arguments(operation: Any) -> list[tuple[str, str]]:
    arguments = [(argument.name, str(argument.type)) for argument in find_schema(operation).arguments]
    return [("", arguments[0][1]), *arguments[1:]]


UNKNOWN_STRIDES = {torch.ops.aten.scaled_dot_product_attention.default}
"""Operations whose kernels return other strides than they do without values: contiguous() of the result may be a copy."""

MAY_SHARE = {getattr(torch.ops.aten, name).default for name in ("reshape", "reshape_as", "ravel", "contiguous")} | {
    torch.ops.aten.flatten.using_ints
}
"""Operations that return a view or a copy, depending on strides."""
