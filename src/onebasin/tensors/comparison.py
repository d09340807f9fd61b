"""Do states fit together, and are their values finite?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onebasin.tensors.row_blocks import list_blocks
from onebasin.tensors.states import LazyState, State


def check_alike(first: State, other: State, first_name: str, other_name: str) -> None:
    """Refuse states of different architectures.

    Args:
        first: a state.
        other: another one.
        first_name: what messages call the first.
        other_name: what they call the other.

    Raises:
        ValueError: naming the first key, shape or kind of type that differs.
    """
    for present, absent, names in ((first, other, (other_name, first_name)), (other, first, (first_name, other_name))):
        for key in present:
            if key not in absent:
                raise ValueError(f"{names[0]} has no {key!r}, which {names[1]} has: they are different architectures")
    theirs = other.shapes
    for key, value in first.shapes.items():
        if key not in theirs:
            raise ValueError(f"{key!r} is a tensor in {first_name} and a {type(other[key]).__name__} in {other_name}")
        if value.shape != theirs[key].shape:
            shapes = f"{tuple(value.shape)} in {first_name} and {tuple(theirs[key].shape)} in {other_name}"
            raise ValueError(f"{key!r} has shape {shapes}: they are different architectures")
        if is_mixed(value) != is_mixed(theirs[key]):
            raise ValueError(f"{key!r} is {value.dtype} in {first_name} and {theirs[key].dtype} in {other_name}")


def is_mixed(value: Any) -> bool:
    """Whether a weighted sum is taken of such values: tensors of numbers with fractions."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class Map(Protocol):
    """What applies a function to each of some items, in order, as ``map`` does; items and functions may be sent away."""

    def __call__(
        self, function: Callable[[Any], Any], items: Iterable[Any], *, size: Callable[[Any], float]
    ) -> Iterable[Any]:
        """Results in the order of the items; `size` is how much work each is, in bytes."""
        ...


def _map_here(function: Callable[[Any], Any], items: Iterable[Any], *, size: Callable[[Any], float]) -> Iterable[Any]:
    return map(function, items)


def check_finite(states: Mapping[str, State], apply_to_all: Map = _map_here) -> None:
    """Refuse states that hold NaN or infinity, or that have no values at all.

    Args:
        states: by what messages call them.
        apply_to_all: what looks at each tensor.

    Raises:
        ValueError: naming the first such tensor.
    """
    sums: list[tuple[str, str, Tensor]] = []
    for name, state in states.items():
        firsts: dict[str, str] = {}
        for key in (key for key, shape in state.shapes.items() if is_mixed(shape)):
            firsts.setdefault(state.find_origin(key), key)
        sizes = {key: state.shapes[key].nbytes for key in firsts.values()}
        found = apply_to_all(functools.partial(_sum_up, state), list(sizes), size=sizes.__getitem__)
        for key, total in zip(sizes, found, strict=True):
            if total.is_meta:
                raise ValueError(f"{name} is on the meta device: it has no values")
            sums.append((name, key, total))
    if _are_finite([total for _, _, total in sums]):
        return
    # What is not finite shows in the sum. The converse fails where a sum of large numbers overflows: look at each then.
    for name, key, total in sums:
        if not total.isfinite() and not _widen(states[name][key]).isfinite().all():
            raise ValueError(f"{key!r} of {name} holds NaN or infinity")


def _sum_up(state: State, key: str) -> Tensor:
    if isinstance(state, LazyState) and state.has_rows(key):
        sums = [_widen(state.read_rows(key, *rows)).sum() for rows in list_blocks(state.shapes[key])]
        return torch.stack(sums).sum()
    return _widen(state[key]).sum()


def _widen(value: Tensor) -> Tensor:
    """In a type that PyTorch computes in: it has no sums of float8 and of complex numbers of two half precision ones."""
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.float() if value.itemsize < 2 else value


def _are_finite(numbers: Sequence[Tensor]) -> bool:
    """One look per device and type: on a GPU each look waits for the device."""
    alike: dict[Any, list[Tensor]] = {}
    for number in numbers:
        alike.setdefault((number.device, number.dtype), []).append(number)
    return all(bool(torch.stack(some).isfinite().all()) for some in alike.values())
