"""Whether `merge` repairs the statistics of its result, in which form, and on what data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from onebasin.landscape.batch_norm import batch_norms
from onebasin.landscape.batches import call_model, check_data, copy_model, split_batch
from onebasin.landscape.calibration import DATA_FREE, RepairForm, can_be_repaired
from onebasin.matching.problem import MovedBatches
from onebasin.relaxation.objectives import Midpoint, Objective, RandomPoint
from onebasin.symmetries import Symmetry
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import Model, StateDict, read_state
from onebasin.torch_internals import tree_leaves

RepairChoice = RepairForm | Literal["auto"] | Iterable[Any] | None
"""What the argument `repair` of `merge` takes."""
_NUM_JUDGED = 4
"""Batches on which a merge is compared with the repaired one."""


def read_repair(
    repair: RepairForm | Iterable[Any] | None, data: Iterable[Any] | None, like: Model
) -> tuple[RepairForm | None, Iterable[Any] | None]:
    """The form, and the batches to measure on, on the device and in the type of a model."""
    if repair is None:
        return None, None
    batches = data
    if not isinstance(repair, str):
        repair, batches = "repair", check_data(repair)
    forms = get_args(RepairForm)
    if repair not in forms:
        named = ", ".join(map(repr, ("auto", *forms)))
        raise ValueError(f"repair must be one of {named}, or batches of data, or None; got {repair!r}")
    if repair not in DATA_FREE and batches is None:
        raise ValueError(f"repair={repair!r} measures the networks: give data=, or take repair='norms', which needs none")
    state = read_state(like)
    dtype = next((value.dtype for value in state.shapes.values() if value.is_floating_point()), state.dtype)
    return cast(RepairForm, repair), None if batches is None else MovedBatches(batches, state.device, dtype)


def suits_repair(
    models: Sequence[Model], shares: Sequence[float], layer_weights: Mapping[str, Sequence[float]] | None
) -> bool:
    """Whether these are networks with one weight each, none below zero, so that their average can be repaired."""
    return all(isinstance(model, nn.Module) for model in models) and min(shares) >= 0 and not layer_weights


def is_repaired_by_default(models: Sequence[Model], symmetry: Symmetry, data: Iterable[Any] | None, seed: int) -> bool:
    """Whether there is something to repair in these networks, and units have a basis of their own to be repaired in.

    Batch norms cannot estimate the statistics of a single example: then nothing is.
    """
    if symmetry.bases or data is None:
        return False
    model = cast(nn.Module, models[0])
    with seeded(seed, read_state(model).device):
        if batch_norms(model) and any(_count_examples(batch) == 1 for batch in data):
            return False
        return can_be_repaired(model, symmetry, data)


def _count_examples(batch: Any) -> int | None:
    """The length of the first tensor among the inputs."""
    inputs = (leaf for leaf in tree_leaves(split_batch(batch)[0]) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(leaf) for leaf in inputs), None)


def lowers_loss(state: StateDict, merged: nn.Module, objective: Objective, data: Iterable[Any]) -> bool:
    """Whether another state of a network has a lower loss on the first batches; true if the objective has no loss."""
    if not isinstance(objective, Midpoint | RandomPoint):
        return True
    model, batches = copy_model(merged), list(itertools.islice(data, _NUM_JUDGED))
    losses = []
    with torch.no_grad():
        for each in (read_state(merged), state):
            model.load_state_dict(each)
            outputs = ((call_model(model, inputs), target) for inputs, target in map(split_batch, batches))
            losses.append(sum(float(objective.loss(output, target)) for output, target in outputs))
    before, after = losses
    return after < before or (math.isnan(before) and math.isfinite(after))
