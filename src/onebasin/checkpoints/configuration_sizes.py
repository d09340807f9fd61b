"""Sizes in a configuration, compared with a checkpoint before so much is built.

A model is built without memory first, so that wide layers cost nothing; but each layer and each expert takes time, and
tables that are computed take memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks|stages)|\w+_layers|layers|depths?|(\w+_)?layers_per_\w+")
"""Names under which configurations keep numbers of layers."""
_ONE_FOR_EACH_BLOCK = ("block_types", "block_out_channels")
"""Endings of the names of lists with an entry for each block, in configurations of diffusers."""
_EXPERTS = re.compile(r"(\w+_)?(num|n)_(\w+_)?experts")
_WIDTHS = re.compile(r"(\w+_)?(sizes?|dims?|channels)|d_\w+|n_embd|n_inner")
"""Of layers, of vocabularies, of images."""
_MOST_ENTRIES = 2**30
"""The most entries of a model without a checkpoint that are no parameters: masks, positions."""
_ENTRIES_PER_ENTRY = 16
"""A packed number of a quantised checkpoint stands for at most so many of the model."""
_FREE_ENTRIES = 2**26
"""So many entries are built in any case: a checkpoint need not hold masks and positions that are computed."""


class _Limit(NamedTuple):
    """What a number may be: so much in any case, and without a checkpoint."""

    names: re.Pattern[str]
    always: int
    without_checkpoint: int
    uses_extents: bool


_LIMITS = (
    _Limit(_LAYERS, 100, 1000, False),  # a configuration may name layers that its model leaves out
    _Limit(_EXPERTS, 100, 1000, True),
    _Limit(_WIDTHS, 2**17, 2**22, True),
)


def check_sizes(content: dict[str, Any], file: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Refuse a configuration with numbers that its checkpoint cannot have.

    There is at least one tensor for each layer; there is one for each expert, or an axis as long as there are experts; and
    there is an axis as long as a layer is wide, or as a vocabulary is large.

    Args:
        content: of the configuration.
        file: where it stands, for the message.
        tensors: of the checkpoint, on the meta device; None if there is none.

    Raises:
        ValueError: naming the entry.
    """
    longest = max((size for tensor in (tensors or {}).values() for size in tensor.shape), default=0)
    for name, number in _find_numbers(content):
        limit = _find_limit(name)
        if limit is None:
            continue
        if tensors is None:
            most, have = limit.without_checkpoint, f"at most {limit.without_checkpoint} are built"
        else:
            most = max(limit.always, len(tensors), longest if limit.uses_extents else 0)
            axes = f", no axis of them longer than {longest}" if limit.uses_extents else ""
            have = f"the checkpoint has {len(tensors)} tensors{axes}"
        if number > most:
            raise ValueError(
                f"{file} says {name}: {str(number)[:20]}, but {have}: the configuration is damaged, or of another model"
            )


def check_entries(model: nn.Module, file: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Refuse a model that has far more entries than its checkpoint, before memory is taken for it.

    Args:
        model: on the meta device.
        file: where its configuration stands, for the message.
        tensors: of the checkpoint, on the meta device; None if there is none.

    Raises:
        ValueError: with both numbers.
    """
    computed = sum(buffer.numel() for buffer in model.buffers())
    if tensors is None:
        if computed > _MOST_ENTRIES:
            raise ValueError(f"the model of {file} computes tables of {computed} entries: at most {_MOST_ENTRIES} are built")
        return
    found = sum(tensor.numel() for tensor in tensors.values())
    built = sum(parameter.numel() for parameter in model.parameters()) + computed
    if built > _ENTRIES_PER_ENTRY * found + _FREE_ENTRIES:
        raise ValueError(
            f"the model of {file} has {built} entries, but the checkpoint has {found}: the configuration is damaged, or of "
            "another model"
        )


@functools.lru_cache(maxsize=1000)
def _find_limit(name: str) -> _Limit | None:
    return next((limit for limit in _LIMITS if limit.names.fullmatch(name)), None)


def _find_numbers(content: Any) -> Iterator[tuple[str, float]]:
    """Every number in a configuration and in those inside it, with its name; and how many types of blocks there are."""
    remaining = [("", content)]
    while remaining:
        name, part = remaining.pop()
        if isinstance(part, dict):
            remaining += part.items()
        elif isinstance(part, list):
            remaining += [(name, each) for each in part]
            yield from [("num_blocks", len(part))] if name.endswith(_ONE_FOR_EACH_BLOCK) else []
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield name, part
