"""Whether `merge` repairs the statistics of its result, in which form, and on what data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from onebasin.landscape.batches import call_model, check_data, copy_model, move_to, split_batch
from onebasin.landscape.calibration import DATA_FREE, RepairForm, can_be_repaired, check_form
from onebasin.matching.checks import Call
from onebasin.relaxation.objectives import Midpoint, RandomPoint
from onebasin.symmetries import Symmetry
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import Model, StateDict, read_state

RepairChoice = RepairForm | Literal["auto"] | Iterable[Any] | None
"""What the argument `repair` of `merge` takes."""
_NUM_JUDGED = 4
"""Batches on which a merge is compared with the repaired one."""


def read_repair(
    repair: RepairForm | Iterable[Any] | None, data: Iterable[Any] | None
) -> tuple[RepairForm | None, Iterable[Any] | None]:
    """The form, and the batches to measure on."""
    if repair is None:
        return None, None
    if not isinstance(repair, str):
        return "repair", check_data(repair)
    check_form("repair", repair)
    if repair not in DATA_FREE and data is None:
        raise ValueError(f"repair={repair!r} measures the networks: give data=, or take repair='norms', which needs none")
    return cast(RepairForm, repair), None if data is None else check_data(data)


def suits_repair(
    models: Sequence[Model], shares: Sequence[float], layer_weights: Mapping[str, Sequence[float]] | None
) -> bool:
    """Whether these are networks with one weight each, none below zero, so that their average can be repaired."""
    return all(isinstance(model, nn.Module) for model in models) and min(shares) >= 0 and not layer_weights


def is_repaired_by_default(models: Sequence[Model], symmetry: Symmetry, data: Iterable[Any] | None, seed: int) -> bool:
    """Whether there is something to repair in these networks, and units have a basis of their own to be repaired in."""
    if symmetry.bases or data is None:
        return False
    with seeded(seed, read_state(models[0]).device):
        return can_be_repaired(cast(nn.Module, models[0]), symmetry, data)


def lowers_loss(state: StateDict, merged: nn.Module, call: Call) -> bool:
    """Whether another state of a network has a lower loss on the first batches; true if the objective has no loss."""
    if not isinstance(call.objective, Midpoint | RandomPoint) or call.data is None:
        return True
    model, batches = copy_model(merged), list(itertools.islice(call.data, _NUM_JUDGED))
    losses = []
    with torch.no_grad():
        for each in (read_state(merged), state):
            model.load_state_dict(each)
            outputs = ((call_model(model, inputs), target) for inputs, target in map(split_batch, batches))
            losses.append(sum(float(call.objective.loss(output, move_to(model, target))) for output, target in outputs))
    return losses[1] < losses[0]
