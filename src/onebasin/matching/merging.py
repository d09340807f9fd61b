"""Average several models in one basin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from onebasin.landscape.batches import check_data
from onebasin.landscape.calibration import RepairForm
from onebasin.landscape.calibration import repair as repair_statistics
from onebasin.matching.alignment import Alignment, align
from onebasin.matching.checks import find_symmetry
from onebasin.matching.methods import Method, MethodName
from onebasin.matching.methods.base import check_choice
from onebasin.matching.recommendation import AUTO
from onebasin.symmetries import Permutation, Symmetry
from onebasin.tensors.interpolation import check_weights, interpolate
from onebasin.tensors.states import LazyState, Model


def merge(
    models: Sequence[Model],
    example_inputs: Any = None,
    weights: Sequence[float] | None = None,
    repair: RepairForm | Iterable[Any] | None = None,
    symmetry: Symmetry | None = None,
    method: MethodName | Literal["auto"] | Method = AUTO,
    reference: Literal["first", "mean"] = "first",
    max_rounds: int = 10,
    seed: int = 0,
    on_aligned: Callable[[list[Permutation]], None] | None = None,
    on_alignment: Callable[[int, Alignment], None] | None = None,
    **options: Any,
) -> Any:
    """Align models of one architecture and average them.

    Args:
        models: two or more modules, state dicts or lazy states; left untouched.
        example_inputs: to trace the symmetry with; not needed if `symmetry` is given.
        weights: of the models in the average; equal if None. They are scaled to sum to one.
        repair: how to put the statistics of the merged model right: a form of `onebasin.repair` by its name, measured on
            `data`; or batches of data for the form "repair"; or None to leave the merged model as it is.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`. One written by hand is verified if inputs are known.
        method: how to align; see `onebasin.align`.
        reference: what the models are aligned to. "first": every model to the first. "mean": every model in turn to the mean
            of the others, until nothing moves (MergeMany of Git Re-Basin).
        max_rounds: the most rounds over the models with ``reference="mean"``.
        seed: for everything random.
        on_aligned: called with what was done to each model, before they are averaged.
        on_alignment: called after each alignment with the number of the model that it moved, from zero, and its result.
        **options: passed to `onebasin.align`.

    Returns:
        A new module of the first one's type, dtype and device; of states, a state, and of lazy ones a lazy one.

    Raises:
        ValueError: if there are fewer than two models, or the weights do not fit.
    """
    models = list(models)
    if len(models) < 2:
        raise ValueError(f"merging needs at least two models, got {len(models)}")
    shares = check_weights(weights, len(models), normalise=True)
    check_choice("reference", reference, "first", "mean")
    form, batches = _read_repair(repair, options.get("data"))
    if form is not None and not all(isinstance(model, nn.Module) for model in models):
        raise ValueError("repair needs the networks: give modules, not state dicts")
    traced = next((model for model in models if isinstance(model, nn.Module)), models[0])
    symmetry = find_symmetry(traced, example_inputs, symmetry, options.get("data"))
    arguments: dict[str, Any] = {"symmetry": symmetry, "method": method, "seed": seed, **options}

    def align_model(number: int, model: Model, to: Model) -> Alignment:
        result = align(model, to, **arguments)
        if on_alignment is not None:
            on_alignment(number, result)
        return result

    results = [align_model(number, model, models[0]) for number, model in enumerate(models[1:], start=1)]
    frame = _Frame(
        models,
        [models[0], *(result.model for result in results)],
        [symmetry.identity(), *(result.permutation for result in results)],
    )
    if reference == "mean" and len(models) > 2:
        frame.align_to_means(shares, max_rounds, seed, align_model)
    if on_aligned is not None:
        on_aligned(frame.permutations)
    merged = _average(frame.aligned, shares)
    if form is not None:
        found = repair_statistics(merged, frame.aligned, batches, symmetry, weights=shares, form=form)
        merged.load_state_dict(found.state)
    return merged


def _read_repair(
    repair: RepairForm | Iterable[Any] | None, data: Iterable[Any] | None
) -> tuple[RepairForm | None, Iterable[Any] | None]:
    """The form, and the batches to measure on."""
    if repair is None:
        return None, None
    if not isinstance(repair, str):
        return "repair", check_data(repair)
    check_choice("repair", repair, *get_args(RepairForm))
    if repair != "bias" and data is None:
        raise ValueError(f"repair={repair!r} measures the networks: give data=, or take repair='bias', which needs none")
    return cast(RepairForm, repair), None if data is None else check_data(data)


def _average(models: Sequence[Model], shares: Sequence[float]) -> Any:
    mixed = interpolate(models, shares)
    if not isinstance(models[0], nn.Module):
        return mixed
    result = copy.deepcopy(models[0])
    result.load_state_dict(mixed)
    return result


@dataclass(frozen=True)
class _Frame:
    """Models moved into one frame of reference.

    Attributes:
        models: as they were given.
        aligned: as they are now.
        permutations: what was done to each.
    """

    models: list[Model]
    aligned: list[Model]
    permutations: list[Permutation]

    def align_to_means(
        self, shares: list[float], max_rounds: int, seed: int, align_model: Callable[[int, Model, Model], Alignment]
    ) -> None:
        """Align each model to the mean of the others until nothing moves."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(max_rounds):
            moved = False
            for i in torch.randperm(len(self.models), generator=generator).tolist():
                others = [m for j, m in enumerate(self.aligned) if j != i]
                rest = [s for j, s in enumerate(shares) if j != i]
                mean = _average(others, [s / sum(rest) for s in rest])
                result = align_model(i, self.aligned[i], mean)
                if result.cost < result.start_cost and not result.permutation.is_identity:
                    moved, self.permutations[i] = True, result.permutation @ self.permutations[i]
                    # A lazy state is permuted at every reading: once, however often it was moved.
                    lazy = isinstance(self.models[i], LazyState)
                    self.aligned[i] = self.permutations[i].apply(self.models[i]) if lazy else result.model
            if not moved:
                return
