"""Weights of models that differ from layer to layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from onebasin.tensors.interpolation import check_weights


def find_layer_weights(
    keys: Iterable[str], patterns: Mapping[str, Sequence[float]], count: int, ties: Iterable[tuple[str, ...]] = ()
) -> dict[str, list[float]]:
    """The weights of models for each tensor whose name fits a pattern; the first pattern that fits it counts.

    Args:
        keys: the names of all tensors.
        patterns: for each shell pattern one weight for each model; they are scaled to sum to one.
        count: the number of models.
        ties: sets of keys that are one tensor.

    Raises:
        ValueError: if weights do not fit, no tensor fits a pattern, or names of one tensor have different weights.

    >>> find_layer_weights(["a.weight", "b.weight"], {"a.*": [1, 3]}, 2)
    {'a.weight': [0.25, 0.75]}
    """
    keys, shares = list(keys), {}
    for pattern, weights in patterns.items():
        try:
            shares[pattern] = check_weights(weights, count, normalise=True)
        except ValueError as error:
            raise ValueError(f"layer weights of {pattern!r}: {error}") from None
        if not fnmatch.filter(keys, pattern):
            raise ValueError(f"there are layer weights for {pattern!r}, but no tensor has such a name ({keys[0]!r}, ...)")
    chosen = {key: next((p for p in patterns if fnmatch.fnmatchcase(key, p)), None) for key in keys}
    found = {key: shares[pattern] for key, pattern in chosen.items() if pattern is not None}
    for tied in ties:
        present = [key for key in tied if key in chosen]
        for key in present[1:]:
            if found.get(key) != found.get(present[0]):
                raise ValueError(f"{present[0]!r} and {key!r} are one tensor: give them the same layer weights")
    return found
