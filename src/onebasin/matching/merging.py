"""Average several models in one basin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onebasin.landscape.repair import repair as repair_statistics
from onebasin.matching.alignment import align
from onebasin.symmetries.permutation import Permutation
from onebasin.symmetries.structure import Symmetry
from onebasin.tensors.interpolation import interpolate
from onebasin.tensors.lazy import LazyState
from onebasin.tracing import symmetry as trace

Model = nn.Module | Mapping[str, Any]


def merge(
    models: Sequence[Model],
    example_inputs: Any = None,
    weights: Sequence[float] | None = None,
    repair: Iterable[Any] | None = None,
    symmetry: Symmetry | None = None,
    method: str = "weight-matching",
    to: str = "first",
    max_rounds: int = 10,
    seed: int = 0,
    on_aligned: Callable[[list[Permutation]], None] | None = None,
    **options: Any,
) -> Any:
    """Align models of one architecture and average them.

    Args:
        models: two or more modules, state dicts or lazy states; left untouched.
        example_inputs: to trace the symmetry with; not needed if `symmetry` is given.
        weights: of the models in the average; equal if None. They are scaled to sum to one.
        repair: batches of data for `onebasin.repair` on the merged model, or None to leave it as it is.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`.
        method: how to align; see `onebasin.align`.
        to: "first": every model is aligned to the first. "mean": every model in turn is aligned to the mean of the others,
            until nothing moves (MergeMany of Git Re-Basin).
        max_rounds: the most rounds over the models with ``to="mean"``.
        seed: for everything random.
        on_aligned: called with what was done to each model, before they are averaged.
        **options: passed to `onebasin.align`.

    Returns:
        A new module of the first one's type, dtype and device; of states, a state, and of lazy ones a lazy one.

    Raises:
        ValueError: if there are fewer than two models, or the weights do not fit.
    """
    models = list(models)
    if len(models) < 2:
        raise ValueError(f"merging needs at least two models, got {len(models)}")
    shares = _shares(weights, len(models))
    if to not in ("first", "mean"):
        raise ValueError(f"to must be 'first' or 'mean', got {to!r}")
    modules = [model for model in models if isinstance(model, nn.Module)]
    if repair is not None and len(modules) < len(models):
        raise ValueError("repair runs the networks: give modules, not state dicts")
    if symmetry is None:
        if example_inputs is None or not modules:
            raise ValueError("give example_inputs= to trace the models with, or symmetry=")
        symmetry = trace(modules[0], example_inputs)
    arguments: dict[str, Any] = {"symmetry": symmetry, "method": method, "seed": seed, **options}
    results = [align(model, models[0], **arguments) for model in models[1:]]
    aligned = [models[0], *(result.model for result in results)]
    permutations = [symmetry.identity(), *(result.permutation for result in results)]
    if to == "mean" and len(models) > 2:
        _settle(models, aligned, permutations, shares, max_rounds, arguments)
    if on_aligned is not None:
        on_aligned(permutations)
    merged = _average(aligned, shares)
    if repair is not None:
        merged.load_state_dict(repair_statistics(merged, aligned, repair, symmetry, weights=shares).state)
    return merged


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"{count} models need {count} weights, got {len(weights)}")
    total = float(sum(weights))
    if not total or total != total:
        raise ValueError(f"the weights must have a sum other than zero, got {list(weights)}")
    return [float(w) / total for w in weights]


def _average(models: Sequence[Model], shares: Sequence[float]) -> Any:
    mixed = interpolate(models, shares)
    if not isinstance(models[0], nn.Module):
        return mixed
    result = copy.deepcopy(models[0])
    result.load_state_dict(mixed)
    return result


def _settle(
    models: list[Model],
    aligned: list[Model],
    permutations: list[Permutation],
    shares: list[float],
    max_rounds: int,
    arguments: dict[str, Any],
) -> None:
    """Align each model to the mean of the others until nothing moves; `aligned` and `permutations` change in place."""
    generator = torch.Generator().manual_seed(arguments["seed"])
    for _ in range(max_rounds):
        moved = False
        for i in torch.randperm(len(models), generator=generator).tolist():
            others = [m for j, m in enumerate(aligned) if j != i]
            rest = [s for j, s in enumerate(shares) if j != i]
            mean = _average(others, [s / sum(rest) for s in rest])
            result = align(aligned[i], mean, **arguments)
            if result.cost < result.start_cost and not result.permutation.is_identity:
                moved, permutations[i] = True, result.permutation @ permutations[i]
                # A lazy state is permuted at every reading: once, however often it was moved.
                lazy = isinstance(models[i], LazyState)
                aligned[i] = permutations[i].apply(models[i]) if lazy else result.model
        if not moved:
            return
