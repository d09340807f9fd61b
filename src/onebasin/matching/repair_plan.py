"""Whether and how `merge` repairs the statistics of its result, and on what data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from onebasin.landscape.batch_norm import batch_norms
from onebasin.landscape.batches import call_model, check_data, copy_model, split_batch
from onebasin.landscape.bias_calibration import check_chain
from onebasin.landscape.calibration import DATA_FREE, Repair, RepairForm, can_be_repaired, repair
from onebasin.landscape.normalised_twin import has_twin, make_twin
from onebasin.matching.problem import MovedBatches
from onebasin.matching.recommendation import AUTO
from onebasin.relaxation.objectives import Midpoint, Objective, RandomPoint
from onebasin.symmetries import Symmetry, Transform
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import Model, StateDict, read_state
from onebasin.torch_internals import tree_leaves

RepairChoice = RepairForm | Literal["auto"] | Iterable[Any] | None
"""What the argument `repair` of `merge` takes."""
_NUM_JUDGED = 4
"""Batches on which a merge is compared with the repaired one."""


@dataclass(frozen=True)
class RepairPlan:
    """How the statistics of a merge are repaired.

    Attributes:
        form: of `onebasin.repair`; None to leave the merge as it is.
        batches: to measure on, on the device and in the type of the models.
        is_default: whether the user left the choice to us. Then nothing is repaired that does not need it.
    """

    form: RepairForm | None = None
    batches: Iterable[Any] | None = None
    is_default: bool = False

    def for_networks(self, models: Sequence[Model], symmetry: Symmetry, seed: int) -> RepairPlan:
        """The same, without the form if it is the default and there is nothing to repair in these networks.

        Raises:
            ValueError: if the form is named and does not go with these networks.
        """
        if self.form == "bias":
            check_chain(symmetry, read_state(models[0]))
        if self.form is None or not self.is_default or self._finds_statistics(models, symmetry, seed):
            return self
        return replace(self, form=None)

    def see(self, objective: Objective, starts: Sequence[Any], groups: Sequence[str] | None) -> Objective:
        """An objective for the alignments: if it leaves that open, it sees networks with corrected statistics, as the merge.

        Args:
            objective: of the call.
            starts: of the alignments. Scales of some of the groups are not scales of a normalised twin.
            groups: patterns of the groups to decide.
        """
        is_partial = groups is not None and any(isinstance(start, Transform) for start in starts)
        if objective.repaired is not None or self.form is None or self.form in DATA_FREE or is_partial:
            return objective
        return replace(cast(Any, objective), repaired=True)

    def _finds_statistics(self, models: Sequence[Model], symmetry: Symmetry, seed: int) -> bool:
        """Whether there are statistics to repair, and units have a basis of their own to be repaired in.

        Batch norms cannot estimate the statistics of a single example: then there is nothing.
        """
        if symmetry.bases or self.batches is None:
            return False
        model = cast(nn.Module, models[0])
        with seeded(seed, read_state(model).device):
            if batch_norms(model) and any(_count_examples(batch) == 1 for batch in self.batches):
                return False
            return can_be_repaired(model, symmetry, self.batches)

    def wants_twins(self, models: Sequence[Model], symmetry: Symmetry, seed: int) -> bool:
        """Whether the models are to be merged by their normalised twins: it looks at one batch.

        They are if the form "repair" was named and units have scales: a twin has more of these.
        """
        if self.form != "repair" or self.is_default or self.batches is None or symmetry.bases or not symmetry.scales:
            return False
        with seeded(seed, read_state(models[0]).device):
            return has_twin(cast(nn.Module, models[0]), symmetry, self.batches)

    def make_twins(self, models: Sequence[Model], symmetry: Symmetry, seed: int) -> list[nn.Module]:
        """The normalised twins of the models."""
        assert self.batches is not None
        with seeded(seed, read_state(models[0]).device):
            made = [make_twin(cast(nn.Module, model), symmetry, self.batches) for model in models]
        return [twin for twin, _ in filter(None, made)]

    def repair(
        self,
        merged: Model,
        parents: Sequence[Model],
        symmetry: Symmetry,
        shares: Sequence[float],
        objective: Objective,
        seed: int,
    ) -> Repair | None:
        """Repair a merge of aligned parents in place; None if it is left as it is."""
        if self.form is None:
            return None
        model = cast(nn.Module, merged)
        with seeded(seed, read_state(model).device):  # the order of a loader that shuffles
            found = repair(model, parents, self.batches, symmetry, weights=shares, form=self.form)
            if (
                self.is_default
                and self.batches is not None
                and not _lowers_loss(found.state, model, objective, self.batches)
            ):
                return None
        model.load_state_dict(found.state)
        return found


def plan_repair(
    chosen: RepairChoice,
    data: Iterable[Any] | None,
    models: Sequence[Model],
    shares: Sequence[float],
    layer_weights: Mapping[str, Sequence[float]] | None,
) -> RepairPlan:
    """The plan that the argument `repair` of `merge` stands for, before anything is known of the networks.

    Raises:
        ValueError: if there is no such form, or it does not go with the models or the weights.
    """
    are_networks = all(isinstance(model, nn.Module) for model in models)
    is_default = isinstance(chosen, str) and chosen == AUTO
    if is_default:
        chosen = "repair" if data is not None and are_networks and min(shares) >= 0 and not layer_weights else None
    if chosen is None:
        return RepairPlan(is_default=is_default)
    form, batches = (chosen, data) if isinstance(chosen, str) else ("repair", check_data(chosen))
    forms = get_args(RepairForm)
    if form not in forms:
        named = ", ".join(map(repr, (AUTO, *forms)))
        raise ValueError(f"repair must be one of {named}, or batches of data, or None; got {form!r}")
    if form not in DATA_FREE and batches is None:
        raise ValueError(f"repair={form!r} measures the networks: give data=, or take repair='norms', which needs none")
    if not are_networks:
        raise ValueError("repair needs the networks: give modules, not state dicts")
    if min(shares) < 0:
        raise ValueError(f"repair puts the statistics of an average right: no weight may be below zero, got {list(shares)}")
    if layer_weights:
        raise ValueError("repair takes one weight for each model: leave out layer_weights=")
    state = read_state(models[0])
    dtype = next((value.dtype for value in state.shapes.values() if value.is_floating_point()), state.dtype)
    return RepairPlan(
        cast(RepairForm, form), None if batches is None else MovedBatches(batches, state.device, dtype), is_default
    )


def _count_examples(batch: Any) -> int | None:
    """The length of the first tensor among the inputs."""
    inputs = (leaf for leaf in tree_leaves(split_batch(batch)[0]) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(leaf) for leaf in inputs), None)


def _lowers_loss(state: StateDict, merged: nn.Module, objective: Objective, data: Iterable[Any]) -> bool:
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
