"""Average several models in one basin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, cast, get_args

import torch
from torch import nn

from onebasin.engines import Engine, opened
from onebasin.landscape.batches import take_example
from onebasin.landscape.calibration import Repair, RepairForm
from onebasin.landscape.calibration import repair as repair_statistics
from onebasin.landscape.normalised_twin import fold_twin, make_twin
from onebasin.matching.alignment import Alignment, AlignOptions, align, transform_model
from onebasin.matching.canonical_form import canonicalise
from onebasin.matching.checks import Call, check_call, check_callback, find_symmetry
from onebasin.matching.common_frame import find_common_frame
from onebasin.matching.methods import Method, MethodName
from onebasin.matching.methods.base import check_choice, check_count
from onebasin.matching.problem import make_problem
from onebasin.matching.recommendation import AUTO
from onebasin.matching.repair_choice import RepairChoice, is_repaired_by_default, lowers_loss, read_repair, suits_repair
from onebasin.matching.scaling import Scaling, learn_together
from onebasin.relaxation.objectives import each_tied_once, parameter_keys
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.comparison import check_alike
from onebasin.tensors.interpolation import check_weights, interpolate
from onebasin.tensors.layer_weights import find_layer_weights
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import M, Model, read_state

Reference = Literal["first", "mean", "common"]
"""What models are aligned to; see `merge`."""
Start = Permutation | Transform | MethodName | Method | None
"""Where the alignment of a model starts; see `onebasin.align`."""
_GAIN = 1e-3
"""The share of the cost by which a round with scales or bases, which could go on forever, must lower it."""


def merge(
    models: Sequence[M],
    example_inputs: Any = None,
    weights: Sequence[float] | None = None,
    repair: RepairChoice = AUTO,
    symmetry: Symmetry | None = None,
    method: MethodName | Literal["auto"] | Method = AUTO,
    reference: Reference = "first",
    max_rounds: int = 10,
    seed: int = 0,
    on_aligned: Callable[[Sequence[Permutation | Transform]], None] | None = None,
    on_result: Callable[[int, Alignment[Any]], None] | None = None,
    on_repair: Callable[[Repair | None], None] | None = None,
    init: Start | Sequence[Start] = None,
    layer_weights: Mapping[str, Sequence[float]] | None = None,
    untie: bool = False,
    **options: Unpack[AlignOptions],
) -> M:
    """Align models of one architecture and average them.

    Args:
        models: two or more modules, state dicts or lazy states; left untouched.
        example_inputs: to trace the symmetry with; not needed if `symmetry` is given.
        weights: of the models in the average; equal if None. They are scaled to sum to one.
        repair: how to correct the statistics of the merged model: a form of `onebasin.repair` by its name, measured on
            `data`; or batches of data for the form "repair"; or None to leave the merged model as it is. "auto" takes that
            form where there is data and something to repair. If the objective has a loss, the repaired model is kept only if
            its loss on the first four batches is lower. States, merges with `layer_weights`, negative weights or changes of
            basis, and batch norms where a batch has a single example are not repaired by default. Named, and with
            ``kinds="positive"``, the form "repair" merges the normalised twins of networks without norms, see
            `onebasin.landscape.normalised_twin`, and folds the norms into the weights; callbacks are given the twins.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`. One written by hand is verified if inputs are known.
        method: how to align; see `onebasin.align`.
        reference: what the models are aligned to. "first": every model to the first. "mean": from there, every model in turn
            to the mean of the others, until nothing moves (MergeMany of Git Re-Basin; with rotations, generalised Procrustes
            analysis). Scales and bases are then those of the method, and learned only if `scaling` is given. "common": from
            there, all models at once to a common frame, by Frank-Wolfe on the inner products of their weights (C2M3), with
            all models in memory; if the symmetry has scales or bases, these are learned for all models at once instead, on
            lines between each model and mixtures of the others.
        max_rounds: the most rounds over the models with ``reference="mean"``.
        seed: for everything random.
        on_aligned: called with what was done to each model, before they are averaged: a `Permutation`, or a `Transform` of
            its canonical form if the symmetry has scales or bases.
        on_result: called after each alignment with the number of the model that it moved, from zero, and its result.
        on_repair: called with what the repair did, or with None if the merge is left as it is.
        init: where the alignment to the first model starts, see `onebasin.align`: for all models, or a list with one for
            each model but the first.
        layer_weights: other weights in the average for tensors whose names fit a shell pattern, such as
            ``{"layers.0.*": [1, 0]}``. The first pattern that fits counts. The alignment itself uses `weights`.
        untie: with ``kinds="all"``, separate tied tensors in all models if a gain can be folded only after that; see
            `onebasin.canonical`. The result is an untied module.
        **options: passed to `onebasin.align`.

    Returns:
        A new module of the first one's type, dtype and device; of states, a state, and of lazy ones a lazy one.

    Raises:
        ValueError: before any work is done, if there are fewer than two models, they or the weights do not fit, or something
            is missing or out of range; after the alignment, if weights below zero make a variance of a batch norm negative.
        TypeError: likewise, for an option that the method does not have, or data that is no data.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> x = torch.randn(16, 4)
    >>> merged = ob.merge([a, b], example_inputs=x)
    >>> merged(x).shape
    torch.Size([16, 2])
    >>> closer_to_a = ob.merge([a, b], example_inputs=x, weights=[3, 1])
    """
    if not isinstance(given := options.get("engine"), Engine):
        with opened(given) as running:
            return merge(
                models, example_inputs, weights, repair, symmetry, method, reference, max_rounds, seed, on_aligned,
                on_result, on_repair, init, layer_weights, untie, **{**options, "engine": running},
            )  # fmt: skip
    if "to" in options:
        raise TypeError("merge has no argument to=: what the models are aligned to is reference='first', 'mean' or 'common'")
    models = list(models)
    if len(models) < 2:
        raise ValueError(f"merging needs at least two models, got {len(models)}")
    shares = check_weights(weights, len(models), normalise=True)
    check_choice("reference", reference, *get_args(Reference))
    check_count("max_rounds", max_rounds, at_least=0)
    check_callback("on_aligned", on_aligned)
    check_callback("on_result", on_result)
    check_callback("on_repair", on_repair)
    moved = models if reference == "mean" else models[1:]
    starts = _list_starts(init, len(models) - 1)
    call = check_call(moved, symmetry=symmetry, method=method, seed=seed, init=starts[0], untie=untie, **options)
    options |= {"data": call.data, "groups": call.groups}  # what can be read only once has been read
    for start in starts[1:]:
        check_call(moved, symmetry=symmetry, method=method, seed=seed, init=start, **options)
    scaling = options.get("scaling")
    if scaling is not None and scaling.both and len(models) > 2:
        raise ValueError("Scaling(both=True) is for two ends: of more models, reference='common' moves all but the first")
    is_auto = isinstance(repair, str) and repair == AUTO
    if is_auto:
        repair = "repair" if call.data is not None and suits_repair(models, shares, layer_weights) else None
    form, batches = read_repair(repair, call.data, models[0])
    if form is not None and not all(isinstance(model, nn.Module) for model in models):
        raise ValueError("repair needs the networks: give modules, not state dicts")
    _check_negative(shares, form, reference)
    if given.is_remote and reference == "common" and len(models) > 2:
        raise ValueError(f"engine={given.name!r} holds no models in memory: take reference='first' or 'mean'")
    states = [read_state(model) for model in models]
    for number, state in enumerate(states[1:], start=2):
        check_alike(states[0], state, "the first model", f"model {number}")
    if layer_weights and form is not None:
        raise ValueError("repair takes one weight for each model: leave out layer_weights=")
    if layer_weights:  # ties are known after tracing
        find_layer_weights(states[0].shapes, layer_weights, len(models))
    kinds, notes, module = options.pop("kinds", "permutation"), {}, options.pop("module", None)
    if kinds == "all" and symmetry is None:
        models, symmetry, notes = canonicalise(models, example_inputs, call.data, untie, module)
    symmetry = find_symmetry(models, example_inputs, symmetry, call.data, kinds, module)
    if is_auto and form is not None and not is_repaired_by_default(models, symmetry, batches, seed):
        form = None
    if (
        symmetry.scales
        and not symmetry.bases
        and form == "repair"
        and not is_auto
        and batches is not None
        and isinstance(models[0], nn.Module)
    ):
        twins = [make_twin(cast(nn.Module, model), symmetry, batches) for model in models]
        if all(twins):
            passed = {"weights": weights, "repair": batches, "method": method, "seed": seed, "reference": reference}
            passed |= {**options, "init": starts, "kinds": "positive"}
            found = [twin[0] for twin in twins if twin is not None]
            passed |= {"on_aligned": on_aligned, "on_result": on_result, "on_repair": on_repair}
            return cast(M, _merge_twins(models[0], found, call, passed))

    def align_model(number: int, model: Model, to: Model, start: Start, how: AlignOptions) -> Alignment[Any]:
        result = align(model, to, symmetry=symmetry, method=method, seed=seed, init=start, **how)
        result = replace(result, notes=(*notes, *result.notes), noted_models=notes)
        if on_result is not None:
            on_result(number, result)
        return result

    def align_again(number: int, model: Model, to: Model) -> Alignment[Any]:
        start = starts[max(number - 1, 0)]
        is_applied = isinstance(start, Permutation | Transform)
        scaling = options.get("scaling") or Scaling(steps=0)  # to learn in every round would take long
        return align_model(number, model, to, None if is_applied else start, {**options, "scaling": scaling})

    pairs = enumerate(zip(models[1:], starts, strict=True), start=1)
    results = [align_model(number, model, models[0], start, options) for number, (model, start) in pairs]
    elements: list[Permutation | Transform] = [symmetry.identity(), *(result.permutation for result in results)]
    if symmetry.scales or symmetry.bases:
        first = results[0].target_transform or Transform(symmetry.identity(), {})
        elements = [first, *(result.transform for result in results)]
    frame = _Frame(models, [results[0].target, *(result.model for result in results)], elements, symmetry)
    if reference == "mean" and len(models) > 2:
        frame.align_to_means(shares, max_rounds, seed, align_again)
    elif reference == "common" and len(models) > 2 and (symmetry.scales or symmetry.bases):
        with show_progress(options.get("progress", False)) as report, seeded(seed, read_state(models[0]).device):
            frame.learn_together(call, options.get("scaling") or Scaling(), report)
    elif reference == "common" and len(models) > 2:
        with show_progress(options.get("progress", False)) as report:
            frame.align_all(shares, symmetry.restrict(call.groups), report)
    if on_aligned is not None:
        on_aligned(frame.elements)
    by_key = find_layer_weights(states[0].shapes, layer_weights or {}, len(models), symmetry.ties)
    merged = _average(frame.aligned, shares, by_key)
    repaired = None
    if form is not None:
        with seeded(seed, read_state(merged).device):  # the order of a loader that shuffles
            repaired = repair_statistics(merged, frame.aligned, batches, symmetry, weights=shares, form=form)
            if is_auto and batches is not None and not lowers_loss(repaired.state, merged, call.objective, batches):
                repaired = None
    if repaired is not None:
        merged.load_state_dict(repaired.state)
    if on_repair is not None:
        on_repair(repaired)
    if min(min(each) for each in (shares, *by_key.values())) < 0:
        _check_variances(merged, shares)
    return merged


def _list_starts(init: Start | Sequence[Start], count: int) -> list[Start]:
    """One start for each of the models that are aligned to the first."""
    if not isinstance(init, list | tuple):
        return [cast(Start, init)] * count
    if len(init) != count:
        raise ValueError(
            f"{count} models are aligned to the first, and init has {len(init)} starts: give one for each of them"
        )
    return list(init)


def _check_negative(shares: Sequence[float], form: RepairForm | None, reference: Reference) -> None:
    """Refuse weights below zero where they have no meaning."""
    if form is not None and min(shares) < 0:
        raise ValueError(f"repair puts the statistics of an average right: no weight may be below zero, got {list(shares)}")
    if reference == "mean" and len(shares) > 2 and any(abs(sum(shares) - share) < 1e-9 for share in shares):
        raise ValueError(
            f"reference='mean' takes the mean of all models but one, and the weights of some sum to zero: {list(shares)}"
        )


def _check_variances(merged: Model, shares: Sequence[float]) -> None:
    """Refuse a merge with a negative variance of a batch norm, whose root is not a number."""
    state = read_state(merged)
    for key in (key for key in state.shapes if key.rpartition(".")[2] == "running_var"):
        if not bool((state[key] >= 0).all()):
            listed = ", ".join(f"{share:.4g}" for share in shares)
            raise ValueError(
                f"the variance {key!r} of a batch norm would be negative with the weights {listed}: take weights that are "
                "closer to those of an average"
            )


def _merge_twins(model: nn.Module, twins: Sequence[nn.Module], call: Call, options: dict[str, Any]) -> nn.Module:
    """Merge the normalised twins of networks without norms, and fold the norms into the weights.

    A filter before a norm can be scaled on its own, so twins have more scales than the networks they are twins of.
    """
    if call.groups is not None or any(isinstance(start, Permutation | Transform) for start in options["init"]):
        raise ValueError(
            "networks without norms are merged by their normalised twins, whose groups have other names: "
            "leave out groups= and init=, or take repair='rescale'"
        )
    merged = merge(twins, take_example(options["repair"]), **options)
    result = copy.deepcopy(model)
    result.load_state_dict(fold_twin(merged, model))
    return result


def _average(models: Sequence[Model], shares: Sequence[float], by_key: Mapping[str, Sequence[float]] | None = None) -> Any:
    mixed = interpolate(models, shares, by_key)
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
        elements: what was done to each: permutations or, if the symmetry has scales or bases, transforms.
        symmetry: of all models.
    """

    models: list[Model]
    aligned: list[Model]
    elements: list[Any]
    symmetry: Symmetry

    def align_to_means(
        self, shares: list[float], max_rounds: int, seed: int, align_model: Callable[[int, Model, Model], Alignment[Any]]
    ) -> None:
        """Align each model to the mean of the others until nothing moves."""
        generator = torch.Generator().manual_seed(seed)
        is_exact = not self.symmetry.scales and not self.symmetry.bases
        fixed = {key: [1.0] + [0.0] * (len(self.models) - 2) for key in self.symmetry.fixed}  # means of ones are rounded
        for _ in range(max_rounds):
            moved = False
            for i in torch.randperm(len(self.models), generator=generator).tolist():
                others = [m for j, m in enumerate(self.aligned) if j != i]
                rest = [s for j, s in enumerate(shares) if j != i]
                mean = _average(others, [s / sum(rest) for s in rest], fixed)
                result = align_model(i, self.aligned[i], mean)
                found = result.permutation if is_exact else result.transform
                needed = result.start_cost if is_exact else result.start_cost * (1 - _GAIN)
                if result.cost < needed and not found.is_identity:
                    moved, self.elements[i] = True, found @ self.elements[i]
                    # A lazy state is permuted at every reading: once, however often it was moved.
                    lazy = read_state(self.models[i]).is_lazy
                    self.aligned[i] = self.elements[i].apply(self.models[i]) if lazy else result.model
            if not moved:
                return

    def learn_together(self, call: Call, scaling: Scaling, progress: Progress) -> None:
        """Learn scales and bases of all models but the first at once, and add them to the transforms that were found."""
        first, *others = self.aligned
        chosen = self.symmetry.restrict(call.groups)
        problems = [make_problem(model, first, chosen, call.objective, call.data, lazily=False) for model in others]
        found = learn_together([replace(problem, progress=progress) for problem in problems], scaling)
        for i, learned in enumerate(found, start=1):
            update = Transform(self.symmetry.identity(), learned.logarithms, learned.matrices)
            self.elements[i] = update @ self.elements[i]
            self.aligned[i] = transform_model(self.models[i], self.elements[i])

    def align_all(self, shares: list[float], symmetry: Symmetry, progress: Progress) -> None:
        """Align all models at once, from where they are now."""
        keys = each_tied_once(parameter_keys(self.models[0]), symmetry)
        given = [read_state(model) for model in self.aligned]
        device, dtype = given[0].device, torch.promote_types(given[0].dtype, torch.float32)
        states = [{key: state[key].detach().to(device, dtype) for key in keys} for state in given]
        found = find_common_frame(states, symmetry, [symmetry.identity()] * len(states), shares, progress)
        for i, update in enumerate(found):
            whole = self.symmetry  # with the groups that are to stay as they are
            update = Permutation(whole, {**whole.identity_indices, **update.indices}, check=False)
            self.elements[i] = update @ self.elements[i]
            self.aligned[i] = transform_model(self.models[i], self.elements[i])
