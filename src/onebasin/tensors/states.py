"""What a model is to us: a dict from state key to tensor, in which tied keys hold the same tensor object."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]
"""Every key of ``state_dict()``. Values are tensors, except for a module's extra state, which passes through untouched."""


def read_state(model: nn.Module | Mapping[str, Any]) -> State:
    """The state of a module or of a mapping: detached, never copied, ties kept as identity.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(model, nn.Module):
        state = model.state_dict(keep_vars=True)
    elif isinstance(model, Mapping):
        state = model
    else:
        raise TypeError(f"expected a torch.nn.Module or a state dict, got {type(model).__name__}")
    detached: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in detached:
            detached[id(value)] = value.detach() if isinstance(value, Tensor) else value
    return {key: detached[id(value)] for key, value in state.items()}


def find_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """State keys that hold one and the same memory, as tuples in state-dict order.

    Raises:
        ValueError: if two parameters share part of their memory without being the same: a permutation of one would
            have to move the other, and no layout of ours says how.
    """
    by_memory: dict[tuple[Any, ...], list[str]] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    seen: dict[int, list[str]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        if id(value) in seen:
            seen[id(value)].append(key)
            continue
        if value.is_meta:  # no memory to share
            seen[id(value)] = by_memory.setdefault(("meta", id(value)), [])
        else:
            storage = value.untyped_storage().data_ptr()
            identity = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
            if identity not in by_memory:
                start = int(value.storage_offset()) * value.element_size()
                extent = int(sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))) + 1
                spans.setdefault(storage, []).append((start, start + extent * value.element_size(), key))
            seen[id(value)] = by_memory.setdefault(identity, [])
        seen[id(value)].append(key)
    for intervals in spans.values():
        intervals.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(intervals):
            if start < end:
                raise ValueError(
                    f"{first!r} and {second!r} share part of their memory; give each its own tensor "
                    "(a view of another parameter should be taken in forward, not stored)"
                )
    return tuple(tuple(keys) for keys in by_memory.values() if len(keys) > 1)


def check_ties(state: Mapping[str, Any], ties: Iterable[tuple[str, ...]]) -> None:
    """Refuse a state whose tied keys hold different values."""
    for keys in ties:
        present = [k for k in keys if k in state]
        for key in present[1:]:
            first, other = state[present[0]], state[key]
            if first is not other and not torch.equal(first, other):
                raise ValueError(f"{present[0]!r} and {key!r} are one tied tensor in the model, but their values differ")
