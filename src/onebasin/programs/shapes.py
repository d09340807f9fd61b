"""What an operation returns, without computing it: shapes, strides, types, and whose memory a result shares or writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from onebasin.torch_internals import find_schema, memory_id, overload_name

_META = torch.device("meta")


class Shapes:
    """Answers once for all calls with operands of the same shapes, since layers repeat."""

    def __init__(self) -> None:
        self._metas: dict[Any, Tensor] = {}
        self._returned: dict[Any, tuple[Any, list[int | None]]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """One tensor without memory for all of the same shape, strides and type."""
        key = (tensor.size(), tensor.stride(), tensor.dtype)
        if key not in self._metas:
            self._metas[key] = make_empty(tensor)
        return self._metas[key]

    def compute(self, func: Any, nodes: Any) -> tuple[Any, list[int | None]]:
        """What an operation returns, a tensor or a sequence of those, and for each the operand whose memory it shares.

        Args:
            func: an operation.
            nodes: its arguments and keyword arguments; the nodes among them have their shapes in ``meta["val"]``.

        Raises:
            TypeError: if it returns something else.
        """
        key = (func, _freeze(nodes))
        if key not in self._returned:
            operands: list[Tensor] = []

            def convert(value: Any) -> Any:
                if isinstance(value, torch.device):
                    return _META
                if isinstance(value, torch.Generator):
                    return None
                operands.append(make_empty(value.meta["val"]))  # memory of its own, so that views can be told
                return operands[-1]

            args, kwargs = map_leaves(nodes, (Node, torch.device, torch.Generator), convert)
            found = _foresee(func, *args) if args and not kwargs else None
            found = func(*args, **kwargs) if found is None else found
            results = [found] if isinstance(found, Tensor) else found
            if not isinstance(results, (list, tuple)) or not all(r is None or isinstance(r, Tensor) for r in results):
                raise TypeError(f"{func} returns something else than tensors")
            owners = {memory_id(operand): place for place, operand in reversed(list(enumerate(operands)))}
            shared = [None if r is None else owners.get(memory_id(r)) for r in results]
            self._returned[key] = map_leaves(found, Tensor, self.of), shared
        return self._returned[key]


def map_leaves(value: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts with everything of these kinds in them replaced."""
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, (list, tuple)):
        found = [map_leaves(v, kinds, function) for v in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: map_leaves(v, kinds, function) for key, v in value.items()}
    return value


def iterate_leaves(value: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from iterate_leaves(entry)
    elif isinstance(value, dict):
        yield from iterate_leaves(list(value.values()))
    else:
        yield value


def _freeze(value: Any) -> Any:
    """A key that two values share only if they are the same to an operation; 1 and 1.0 are not."""
    if isinstance(value, Node):
        return id(value.meta["val"])
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(v)) for key, v in value.items())
    return type(value), value


def make_empty(like: Tensor, device: torch.device = _META) -> Tensor:
    """A tensor of the same shape, strides and type; without memory, unless a device is named."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)


_ALIKE = {getattr(torch.ops.aten, name).default for name in ("relu", "gelu", "silu", "tanh", "sigmoid")}


def _foresee(func: Any, inputs: Any, *others: Any) -> Tensor | None:
    """What the commonest operations return, which take a millisecond to say so themselves; None where that is not plain."""
    if func in _ALIKE and inputs.is_floating_point() and _is_dense(inputs):
        return make_empty(inputs)
    if func is torch.ops.aten.linear.default:
        weight, *bias = others
        fits = weight.dim() == 2 and inputs.dim() > 0 and inputs.shape[-1] == weight.shape[1]
        fits &= all(b is None or (b.shape, b.dtype) == (weight.shape[:1], weight.dtype) for b in bias)
        if fits and inputs.dtype == weight.dtype:
            return torch.empty((*inputs.shape[:-1], weight.shape[0]), dtype=inputs.dtype, device=_META)
    if func is torch.ops.aten.batch_norm.default and inputs.dim() > 1 and not others[4]:
        fits = all(v is None or v.shape == inputs.shape[1:2] for v in others[:2])
        fits &= all(v is not None and v.shape == inputs.shape[1:2] for v in others[2:4])
        made = make_empty(inputs) if _is_dense(inputs) else torch.empty(inputs.shape, dtype=inputs.dtype, device=_META)
        return made if fits else None
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether a result has the strides of its operand for sure: without gaps or repetition."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def written(func: Any) -> tuple[int, ...]:
    """Which arguments of an operation are written."""
    arguments = find_schema(func).arguments if find_schema(func).is_mutable else ()
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def without_writing(func: Any) -> Any:
    """The operation that returns what this one writes: relu for relu_. None if there is none."""
    name = find_schema(func).name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    pure = getattr(packet, overload_name(func), None)
    if pure is None or _argument_names(pure)[1:] != _argument_names(func)[1:]:
        return None
    return pure


def _argument_names(operation: Any) -> list[str]:
    return [argument.name for argument in find_schema(operation).arguments]


# The kernels of this one return other strides than it does without values: contiguous() on it may copy, or may not.
OTHER_STRIDES = {torch.ops.aten.scaled_dot_product_attention.default}
# And whether these return a view depends on strides.
MAY_SHARE = {getattr(torch.ops.aten, name).default for name in ("reshape", "reshape_as", "ravel", "contiguous")} | {
    torch.ops.aten.flatten.using_ints
}
