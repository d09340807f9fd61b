"""Several models moved into one frame of reference: to the first, to the mean of the others, or all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from onebasin.landscape.batches import copy_with_state
from onebasin.matching.alignment import Alignment, AlignOptions, align, transform_model
from onebasin.matching.checks import Call
from onebasin.matching.common_frame import find_common_frame
from onebasin.matching.methods import Method, MethodName
from onebasin.matching.problem import make_problem
from onebasin.matching.scaling import Scaling, learn_together
from onebasin.relaxation.objectives import each_tied_once, parameter_keys
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.interpolation import interpolate
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import Model, read_state

Reference = Literal["first", "mean", "common"]
"""What models are aligned to; see `onebasin.merge`."""
Start = Permutation | Transform | MethodName | Method | None
"""Where the alignment of a model starts; see `onebasin.align`."""
_GAIN = 1e-3
"""The share of the cost by which a round with scales or bases, which could go on forever, must lower it."""


@dataclass(frozen=True)
class Aligner:
    """How each model is aligned to another.

    Attributes:
        symmetry: of all models.
        method: see `onebasin.align`.
        seed: for everything random.
        starts: of all models but the first.
        options: further arguments of `onebasin.align`.
        notes: about canonical forms, each with the numbers of the models that it is about.
        on_result: called with the number of a model and its alignment.
    """

    symmetry: Symmetry
    method: MethodName | Literal["auto"] | Method
    seed: int
    starts: Sequence[Start]
    options: AlignOptions
    notes: Mapping[str, Sequence[int]]
    on_result: Callable[[int, Alignment[Any]], None] | None

    def align_to_first(self, models: Sequence[Model]) -> Frame:
        """Every model aligned to the first."""
        pairs = enumerate(zip(models[1:], self.starts, strict=True), start=1)
        results = [self._align(number, model, models[0], start, self.options) for number, (model, start) in pairs]
        elements: list[Any] = [self.symmetry.identity(), *(result.permutation for result in results)]
        if self.symmetry.scales or self.symmetry.bases:
            first = results[0].target_transform or Transform(self.symmetry.identity(), {})
            elements = [first, *(result.transform for result in results)]
        aligned = [results[0].target, *(result.model for result in results)]
        return Frame(list(models), aligned, elements, self.symmetry)

    def align_again(self, number: int, model: Model, to: Model) -> Alignment[Any]:
        """A model that was aligned before, aligned to something else."""
        start = self.starts[max(number - 1, 0)]
        is_applied = isinstance(start, Permutation | Transform)
        scaling = self.options.get("scaling") or Scaling(steps=0)  # to learn in every round would take long
        return self._align(number, model, to, None if is_applied else start, {**self.options, "scaling": scaling})

    def _align(self, number: int, model: Model, to: Model, start: Start, options: AlignOptions) -> Alignment[Any]:
        found = align(model, to, symmetry=self.symmetry, method=self.method, seed=self.seed, init=start, **options)
        result = replace(found, notes=(*self.notes, *found.notes), noted_models=self.notes)
        if self.on_result is not None:
            self.on_result(number, result)
        return result


@dataclass
class Frame:
    """Models on their way into one frame of reference.

    Attributes:
        models: as they were given.
        aligned: as they are now.
        elements: what was done to each so far: permutations or, if the symmetry has scales or bases, transforms.
        symmetry: of all models.
    """

    models: list[Model]
    aligned: list[Model]
    elements: list[Any]
    symmetry: Symmetry

    def bring_together(
        self, reference: Reference, shares: Sequence[float], max_rounds: int, call: Call, aligner: Aligner
    ) -> None:
        """Move models that were aligned to the first on to a reference; two models stay where they are."""
        if reference == "first" or len(self.models) == 2:
            return
        if reference == "mean":
            self._align_to_means(shares, max_rounds, aligner)
            return
        with show_progress(aligner.options.get("progress", False)) as report:
            if not (self.symmetry.scales or self.symmetry.bases):
                self._align_all(shares, self.symmetry.restrict(call.groups), report)
                return
            with seeded(aligner.seed, read_state(self.models[0]).device):
                self._learn_together(call, aligner.options.get("scaling") or Scaling(), report)

    def _align_to_means(self, shares: Sequence[float], max_rounds: int, aligner: Aligner) -> None:
        """Align each model to the mean of the others until nothing moves."""
        generator = torch.Generator().manual_seed(aligner.seed)
        is_exact = not self.symmetry.scales and not self.symmetry.bases
        fixed = {key: [1.0] + [0.0] * (len(self.models) - 2) for key in self.symmetry.fixed}  # means of ones are rounded
        for _ in range(max_rounds):
            moved = False
            for i in torch.randperm(len(self.models), generator=generator).tolist():
                others = [m for j, m in enumerate(self.aligned) if j != i]
                rest = [s for j, s in enumerate(shares) if j != i]
                mean = average(others, [s / sum(rest) for s in rest], fixed)
                result = aligner.align_again(i, self.aligned[i], mean)
                found = result.permutation if is_exact else result.transform
                needed = result.start_cost if is_exact else result.start_cost * (1 - _GAIN)
                if result.cost < needed and not found.is_identity:
                    moved, self.elements[i] = True, found @ self.elements[i]
                    # A lazy state is permuted at every reading: once, however often it was moved.
                    lazy = read_state(self.models[i]).is_lazy
                    self.aligned[i] = self.elements[i].apply(self.models[i]) if lazy else result.model
            if not moved:
                return

    def _learn_together(self, call: Call, scaling: Scaling, progress: Progress) -> None:
        """Learn scales and bases of all models but the first at once, and add them to the transforms that were found."""
        first, *others = self.aligned
        chosen = self.symmetry.restrict(call.groups)
        problems = [make_problem(model, first, chosen, call.objective, call.data, lazily=False) for model in others]
        found = learn_together([replace(problem, progress=progress) for problem in problems], scaling)
        identity = self.symmetry.identity()
        self._move(1, (Transform(identity, learned.logarithms, learned.matrices) for learned in found))

    def _align_all(self, shares: Sequence[float], symmetry: Symmetry, progress: Progress) -> None:
        """Align all models at once, from where they are now."""
        keys = each_tied_once(parameter_keys(self.models[0]), symmetry)
        given = [read_state(model) for model in self.aligned]
        device, dtype = given[0].device, torch.promote_types(given[0].dtype, torch.float32)
        states = [{key: state[key].detach().to(device, dtype) for key in keys} for state in given]
        found = find_common_frame(states, symmetry, [symmetry.identity()] * len(states), shares, progress)
        whole = self.symmetry  # with the groups that are to stay as they are
        self._move(0, (Permutation(whole, {**whole.identity_indices, **each.indices}, check=False) for each in found))

    def _move(self, first: int, updates: Iterable[Permutation | Transform]) -> None:
        """Move the models from one number on further."""
        for i, update in enumerate(updates, start=first):
            self.elements[i] = update @ self.elements[i]
            self.aligned[i] = transform_model(self.models[i], self.elements[i])


def average(models: Sequence[Model], shares: Sequence[float], by_key: Mapping[str, Sequence[float]] | None = None) -> Any:
    """The weighted mean: of modules a module of the first one's type, of states a state."""
    mixed = interpolate(models, shares, by_key)
    return copy_with_state(models[0], mixed) if isinstance(models[0], nn.Module) else mixed
