"""Numbers of layers in a configuration, compared with a checkpoint before so many layers are built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks|stages)|\w+_layers|layers|depths?")
"""Names under which configurations of transformers keep numbers of layers."""
_ALWAYS_BUILT = 100
"""So many layers are built in no time, and a configuration may name layers that its model leaves out."""
_BUILT_WITHOUT_WEIGHTS = 1000
"""The most layers if there are no tensors to compare with: published models have some hundred."""


def check_layer_counts(content: dict[str, Any], file: Path, num_tensors: int | None = None) -> None:
    """Refuse a configuration with more layers than there are tensors: each layer has at least one.

    Args:
        content: of the configuration.
        file: where it stands, for the message.
        num_tensors: in the checkpoint; None if there is none.

    Raises:
        ValueError: naming the entry.
    """
    limit = _BUILT_WITHOUT_WEIGHTS if num_tensors is None else max(num_tensors, _ALWAYS_BUILT)
    for name, count in _find_counts(content):
        if count > limit:
            have = f"at most {limit} are built" if num_tensors is None else f"the checkpoint has {num_tensors} tensors"
            raise ValueError(
                f"{file} says {name}: {str(count)[:20]}, but {have}: the configuration is damaged, or of another model"
            )


def _find_counts(content: Any) -> Iterator[tuple[str, float]]:
    """Every number of layers in a configuration and in those inside it, with its name."""
    remaining = [content]
    while remaining:
        part = remaining.pop()
        remaining += part if isinstance(part, list) else part.values() if isinstance(part, dict) else []
        for name, value in part.items() if isinstance(part, dict) else ():
            if _LAYERS.fullmatch(name):
                numbers = value if isinstance(value, list) else [value]
                yield from ((name, each) for each in numbers if isinstance(each, int | float) and not isinstance(each, bool))
