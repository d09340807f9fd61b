"""Average several models in one basin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, cast, get_args

from torch import Tensor, nn

from onebasin.engines import Engine, opened
from onebasin.landscape.batches import copy_with_state, take_example
from onebasin.landscape.calibration import Repair
from onebasin.landscape.normalised_twin import fold_twin
from onebasin.matching.alignment import Alignment, AlignOptions
from onebasin.matching.canonical_form import canonicalise
from onebasin.matching.checks import Call, check_call, check_callback, find_symmetry
from onebasin.matching.frames import Aligner, Reference, Start, average
from onebasin.matching.methods import Method, MethodName
from onebasin.matching.methods.base import check_choice, check_count
from onebasin.matching.recommendation import AUTO
from onebasin.matching.repair_plan import RepairChoice, plan_repair
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.comparison import check_alike
from onebasin.tensors.gradient_mode import computing_gradients
from onebasin.tensors.interpolation import check_weights
from onebasin.tensors.layer_weights import find_layer_weights
from onebasin.tensors.states import M, Model, read_state


@computing_gradients
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
            form where there is data and something to repair. If the objective has a loss, alignments look at repaired
            networks (see `Midpoint.repaired`), and the repaired model is kept only if its loss on the first four batches is
            lower. States, merges with `layer_weights`, negative weights or changes of basis, and batch norms where a batch
            has a single example are not repaired by default. Named, and with ``kinds="positive"``, the form "repair" merges
            the normalised twins of networks without norms (`onebasin.landscape.normalised_twin`), and folds the norms into
            the weights; callbacks are given the twins.
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
    callbacks = {"on_aligned": on_aligned, "on_result": on_result, "on_repair": on_repair}
    models, shares = list(models), _check_models(models, weights, reference, max_rounds, callbacks)
    starts = _list_starts(init, len(models) - 1)
    how = {"symmetry": symmetry, "method": method, "seed": seed, "untie": untie}
    call, options = _check_calls(models[0 if reference == "mean" else 1 :], starts, how, options)
    _check_references(reference, shares, options)
    plan = plan_repair(repair, call.data, models, shares, layer_weights)
    shapes = _check_shapes(models, layer_weights)
    kinds, notes, module = options.pop("kinds", "permutation"), {}, options.pop("module", None)
    if kinds == "all" and symmetry is None:
        models, symmetry, notes = canonicalise(models, example_inputs, call.data, untie, module)
    symmetry = find_symmetry(models, example_inputs, symmetry, call.data, kinds, module)
    plan = plan.for_networks(models, symmetry, seed)
    if options.get("objective") is not None and not symmetry.bases:
        options = {**options, "objective": plan.see(call.objective, starts, call.groups)}
        call = replace(call, objective=options["objective"])
    if plan.wants_twins(models, symmetry, seed):
        _check_twins(call, starts)
        twins = plan.make_twins(models, symmetry, seed)
        passed = {"weights": weights, "method": method, "seed": seed, **callbacks, **options}
        passed |= {"reference": reference, "max_rounds": max_rounds}
        return cast(M, _merge_twins(cast(nn.Module, models[0]), twins, plan.batches, starts, passed))
    aligner = Aligner(symmetry, method, seed, starts, options, notes, on_result)
    frame = aligner.align_to_first(models)
    frame.bring_together(reference, shares, max_rounds, call, aligner)
    if on_aligned is not None:
        on_aligned(frame.elements)
    by_key = find_layer_weights(shapes, layer_weights or {}, len(models), symmetry.ties)
    merged = average(frame.aligned, shares, by_key)
    repaired = plan.repair(merged, frame.aligned, symmetry, shares, call.objective, seed)
    if on_repair is not None:
        on_repair(repaired)
    if min(min(each) for each in (shares, *by_key.values())) < 0:
        _check_variances(merged, shares)
    return merged


def _check_models(
    models: Sequence[Model],
    weights: Sequence[float] | None,
    reference: Reference,
    max_rounds: int,
    callbacks: Mapping[str, Any],
) -> list[float]:
    """The shares of the models in the average, after a look at the arguments that `align` does not have."""
    if len(models) < 2:
        raise ValueError(f"merging needs at least two models, got {len(models)}")
    shares = check_weights(weights, len(models), normalise=True)
    check_choice("reference", reference, *get_args(Reference))
    check_count("max_rounds", max_rounds, at_least=0)
    for name, callback in callbacks.items():
        check_callback(name, callback)
    return shares


def _check_calls(
    moved: Sequence[Model], starts: Sequence[Start], how: dict[str, Any], options: AlignOptions
) -> tuple[Call, AlignOptions]:
    """The arguments that `align` has, checked for each start; and its options, with what can be read only once read."""
    if "to" in options:
        raise TypeError("merge has no argument to=: what the models are aligned to is reference='first', 'mean' or 'common'")
    call = check_call(moved, init=starts[0], **how, **options)
    options = {**options, "data": call.data, "groups": call.groups}
    for start in starts[1:]:
        check_call(moved, init=start, **how, **options)
    return call, options


def _check_references(reference: Reference, shares: Sequence[float], options: AlignOptions) -> None:
    """Refuse what has no meaning for more than two models, or for their reference."""
    if len(shares) == 2:
        return
    scaling, engine = options.get("scaling"), options.get("engine")
    if scaling is not None and scaling.both:
        raise ValueError("Scaling(both=True) is for two ends: of more models, reference='common' moves all but the first")
    if reference == "mean" and any(abs(sum(shares) - share) < 1e-9 for share in shares):
        raise ValueError(
            f"reference='mean' takes the mean of all models but one, and the weights of some sum to zero: {list(shares)}"
        )
    if reference == "common" and isinstance(engine, Engine) and engine.is_remote:
        raise ValueError(f"engine={engine.name!r} holds no models in memory: take reference='first' or 'mean'")


def _check_shapes(models: Sequence[Model], layer_weights: Mapping[str, Sequence[float]] | None) -> Mapping[str, Tensor]:
    """The shapes of the first model's tensors, which the others have too, and which the patterns of weights fit."""
    states = [read_state(model) for model in models]
    for number, state in enumerate(states[1:], start=2):
        check_alike(states[0], state, "the first model", f"model {number}")
    if layer_weights:  # ties are known after tracing
        find_layer_weights(states[0].shapes, layer_weights, len(models))
    return states[0].shapes


def _list_starts(init: Start | Sequence[Start], count: int) -> list[Start]:
    """One start for each of the models that are aligned to the first."""
    if not isinstance(init, list | tuple):
        return [cast(Start, init)] * count
    if len(init) != count:
        raise ValueError(
            f"{count} models are aligned to the first, and init has {len(init)} starts: give one for each of them"
        )
    return list(init)


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


def _check_twins(call: Call, starts: Sequence[Start]) -> None:
    """Refuse what names groups of the networks themselves."""
    if call.groups is not None or any(isinstance(start, Permutation | Transform) for start in starts):
        raise ValueError(
            "networks without norms are merged by their normalised twins, whose groups have other names: "
            "leave out groups= and init=, or take repair='rescale'"
        )


def _merge_twins(
    model: nn.Module,
    twins: Sequence[nn.Module],
    batches: Any,
    starts: Sequence[Start],
    options: dict[str, Any],
) -> nn.Module:
    """Merge the normalised twins of networks without norms, and fold the norms into the weights.

    A filter before a norm can be scaled on its own, so twins have more scales than the networks they are twins of.
    """
    merged = merge(twins, take_example(batches), repair=batches, init=starts, kinds="positive", **options)
    return copy_with_state(model, fold_twin(merged, model))
