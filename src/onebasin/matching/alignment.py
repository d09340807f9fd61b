"""Bring one model into the basin of another: check everything, detect a copy, run a method, polish, apply."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Unpack, cast

from torch import Tensor, nn

from onebasin.engines import Engine, EngineName, opened
from onebasin.engines.work_meter import MEASURING
from onebasin.landscape.batches import find_example
from onebasin.matching.canonical_form import canonicalise
from onebasin.matching.checks import Call, check_call, check_engine, check_models, check_values, find_symmetry, fit_start
from onebasin.matching.methods import Method, MethodName, MethodOptions
from onebasin.matching.problem import Entry, estimate_need, make_problem
from onebasin.matching.recommendation import AUTO, recommend
from onebasin.matching.scaling import Scaling
from onebasin.matching.search import Search
from onebasin.matching.widening import is_narrower, widen
from onebasin.plots.tables import html_table
from onebasin.relaxation.objectives import Function, Objective
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.symmetries.transform import check_fixed
from onebasin.tensors.gradient_mode import computing_gradients
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import M, read_state
from onebasin.tracing import Kinds

WIDENED = "The model was widened to the target's size: what the target has more of are units that do nothing in it."
"""A note of an alignment."""
WANTED = {"positive": "positive scales", "all": "positive scales or changes of basis"}
"""What kinds of symmetry beside permutations ask for, in words."""


@dataclass(frozen=True)
class Alignment(Generic[M]):
    """What `align` found, for models of type `M`.

    Attributes:
        model: a copy of the model, permuted (of a state dict, the permuted state dict; of a lazy state, a lazy one).
        permutation: what was done to it.
        cost: the objective of the permuted model beside the target. By the default on a named objective, without
            `init`, it is at most `start_cost`.
        start_cost: the objective of the model as it was given.
        history: an entry per step or sweep, with the method ("by") that made it.
        converged: whether the method stopped by itself, not by its limit.
        seconds: how long it took.
        method: by which method, or by which in turn; "copy detection" if the model is a permuted copy of the target, so that
            none was run.
        target: the model to align to, in canonical form if bases were asked for: the line is drawn from there.
        target_transform: what was done to the target, after that, if both ends moved (`Scaling.both`).
        notes: what was done beside it, and why, in sentences.
        logits: of "sinkhorn", where its descent ended: give them as ``logits=`` (with the same `init`) to go on from there.
        scales: the logarithms of the positive scales that the permuted units were multiplied by, if any were asked for.
        matrices: of the changes of basis that followed, if any were asked for.
        noted_models: in `merge`, for notes about canonical forms the numbers of the models that they are about.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), method="weight-matching")
    >>> result.method, result.cost <= result.start_cost
    ('weight-matching', True)
    >>> result.permutation.apply(b)["0.weight"].equal(result.model[0].weight)
    True
    """

    model: M
    permutation: Permutation
    cost: float
    start_cost: float
    history: list[Entry]
    converged: bool
    seconds: float
    method: str
    target: M
    notes: tuple[str, ...] = ()
    logits: dict[str, Tensor] | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)
    target_transform: Transform | None = None
    noted_models: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def transform(self) -> Transform:
        """The permutation, the scales and the changes of basis."""
        return Transform(self.permutation, self.scales, self.matrices)

    def __repr__(self) -> str:
        ended = "converged" if self.converged else "stopped at its limit"
        change = f"cost {self.start_cost:.6g} -> {self.cost:.6g}"
        done = self.transform if self.scales or self.matrices else self.permutation
        return f"Alignment({self.method}: {change}, {ended} after {self.seconds:.2f} s, {done!r})"

    def _repr_html_(self) -> str:
        rows = {
            "method": self.method,
            "cost": f"{self.start_cost:.6g} → {self.cost:.6g}",
            "ended": "converged" if self.converged else "at its limit",
            "seconds": f"{self.seconds:.2f}",
            "permutation": repr(self.permutation),
            "scales": f"{len(self.scales)} learned" if self.scales else "none",
            "bases": f"{len(self.matrices)} learned" if self.matrices else "none",
            "notes": " ".join(self.notes),
        }
        return html_table(list(rows.items()))


class AlignOptions(MethodOptions, total=False):
    """The arguments of `align` that `merge` passes on, for keyword arguments."""

    objective: Objective | Function | None
    data: Iterable[Any] | None
    groups: Iterable[str] | str | None
    kinds: Kinds
    module: nn.Module | None
    scaling: Scaling | None
    restarts: int
    detect_copy: bool
    polish: bool | None
    progress: bool | Progress
    callback: Callable[[Entry], None] | None
    engine: Engine | EngineName | None


@computing_gradients
def align(
    model: M,
    to: M,
    example_inputs: Any = None,
    symmetry: Symmetry | None = None,
    method: MethodName | Literal["auto"] | Method = AUTO,
    objective: Objective | Function | None = None,
    data: Iterable[Any] | None = None,
    init: Permutation | Transform | MethodName | Method | None = None,
    groups: Iterable[str] | str | None = None,
    kinds: Kinds = "permutation",
    untie: bool = False,
    module: nn.Module | None = None,
    scaling: Scaling | None = None,
    seed: int = 0,
    restarts: int = 0,
    detect_copy: bool = True,
    polish: bool | None = None,
    progress: bool | Progress = False,
    callback: Callable[[Entry], None] | None = None,
    engine: Engine | EngineName | None = None,
    **options: Unpack[MethodOptions],
) -> Alignment[M]:
    """Permute a model's hidden units so that the objective, for example the distance to the other's parameters, is smallest.

    Args:
        model: the model to permute; it is left untouched. Lazy states, such as checkpoints, are read tensor by tensor if the
            method is "weight-matching", the objective uses no data and nothing is learned, and are loaded otherwise.
        to: the model to align it to, of the same architecture. Their types and devices may differ. If it has more units, the
            model is widened first, see `onebasin.widen`.
        example_inputs: to trace the symmetry with; not needed if `symmetry` or `data` is given. States need `module` too.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`. One written by hand is verified if inputs are known.
        method: "sinkhorn" (the paper), "weight-matching", "activation-matching" (needs `data`), "ste", "exchange" (best with
            `init`), one of those with its options, such as ``Sinkhorn(steps=50)``, or "auto", which chooses and says why in
            `Alignment.notes`.
        objective: what to minimise: `WeightDistance`, `Midpoint`, `RandomPoint`, or any function
            ``(params, target, batch) -> scalar``; `WeightDistance()` if None.
        data: an iterable of (inputs, target) batches that can be read more than once, such as a list or a loader, or a pair
            of tensors. An objective that uses no data does not see it. Hard permutations are compared on the first four
            batches, which are read once. Of 16 batches or more, descents leave out the first four: where data always comes
            in the same order, nothing is kept that is worse than its start on batches that no step has seen.
        init: start from this permutation, this transform (of both models in canonical form, if it has changes of basis), or
            from what another method finds; the result costs no more than that.
        groups: decide only the groups whose names match one of these (shell patterns); the others stay as they are.
        kinds: what to find besides permutations if no `symmetry` is given; see `onebasin.symmetry`. The positive scales of a
            symmetry are learned on the objective after the permutation.
        untie: with ``kinds="all"``, separate tied tensors in both models if a gain can be folded only after that; see
            `onebasin.canonical`. The result is an untied module.
        module: of states, a module of their architecture to trace. Its weights are not used: see
            `onebasin.checkpoints.Architecture.build_hollow`.
        scaling: how scales and bases are learned; `Scaling()` if None. If None, nothing is learned of lazy states that are
            read tensor by tensor: their scales and bases are those of weight matching.
        seed: for everything random, also for loaders that shuffle by PyTorch's global generator, which is left as it was.
            A loader with a generator of its own is read in its own order.
        restarts: further runs, each from a random permutation, until none can cost less; the best result is kept.
        detect_copy: if the objective uses no data, first see whether the model is a permuted copy of the target.
        polish: end with sweeps of weight matching where they lower the cost; if None, after "sinkhorn" without data.
        progress: show a progress line; or a function to call with what is done, how far, and how much there is.
        callback: called with every entry of the history.
        engine: where lazy states are read and compared: "local", "processes" or "ray", or an engine that
            `onebasin.engines.make_engine` made. The results are the same bits.
        **options: of the method, in place of an instance of it.

    Raises:
        ValueError: before any work is done, if the two do not fit, hold NaN, or something is missing or out of range.
        TypeError: likewise, for an option that the method does not have, or data that is no data.

    >>> import copy
    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x = torch.zeros(1, 4)
    >>> twin = copy.deepcopy(mlp)
    >>> _ = twin.load_state_dict(ob.symmetry(mlp, x).random().apply(mlp))
    >>> ob.align(twin, to=mlp, example_inputs=x).cost
    0.0
    """
    if not isinstance(engine, Engine):
        with opened(engine) as running:
            return align(
                model, to, example_inputs, symmetry, method, objective, data, init, groups, kinds, untie, module,
                scaling, seed, restarts, detect_copy, polish, progress, callback, running, **options,
            )  # fmt: skip
    begin = time.perf_counter()
    call = check_call(
        [model], symmetry=symmetry, method=method, objective=objective, data=data, init=init, groups=groups, kinds=kinds,
        untie=untie, module=module, scaling=scaling, seed=seed,
        restarts=restarts, detect_copy=detect_copy, polish=polish, progress=progress, callback=callback,
        engine=engine, **options,
    )  # fmt: skip
    pair = _make_pair(model, to, example_inputs, symmetry, kinds, untie, module, call, engine)
    symmetry, (source, target) = pair.symmetry, pair.models
    chosen, start = symmetry.restrict(call.groups), fit_start(call.init, symmetry)
    methods, advice = _choose_methods(call, chosen, pair, objective is not None, start is not None)
    check_engine(engine, methods, call.objective, symmetry)
    history: list[Entry] = []

    def report(entry: Entry) -> None:
        history.append(entry)
        if callback is not None:
            callback(entry)

    lazily = methods[0].reads_lazily and not call.objective.uses_data and (start is None or _reads_lazily(start))
    lazily = lazily and (scaling is None or not scaling.steps)  # what is learned is learned for all tensors at once
    with show_progress(progress) as show, seeded(seed, read_state(target).device), engine.meter.reporting(show):
        problem = make_problem(source, target, chosen, call.objective, call.data, lazily, in_blocks=True)
        problem = replace(problem, seed=seed, report=report, progress=show, engine=engine)
        if problem.source.is_lazy:  # what does not fit is refused before anything is read
            engine.check_memory(estimate_need(problem))
            engine.meter.expect(MEASURING, 2 * problem.count_bytes(problem.keys))
        if not pair.is_checked:
            check_values(source, target, engine)
        start_cost = problem.cost(chosen.identity())
        search = Search(problem, symmetry, methods[0], polish)
        # Activation matching does not look at the objective: a better start than the identity, even where it costs more.
        most = start_cost if call.method is None and objective is not None and start is None else math.inf
        result = search.run(start, methods[1:], restarts, scaling, detect_copy, most)
    found, learned = result.found, result.learned
    notes = [*pair.notes, *([advice] if advice and not result.is_copy else []), *result.notes]
    if not (result.is_copy or chosen.scales or chosen.bases) and kinds != "permutation":
        notes += [f"There are no {WANTED[kinds]} in this symmetry."]
    element, of_target = found.compose(learned), found.compose_target(learned)
    whole = element if isinstance(element, Transform) else Transform(element, {})
    return Alignment(
        model=transform_model(source, element),
        permutation=whole.permutation,
        cost=learned.cost,
        start_cost=start_cost,
        history=history,
        converged=found.match.converged,
        seconds=time.perf_counter() - begin,
        method=result.method,
        notes=tuple(notes),
        logits=found.match.logits,
        scales=whole.logarithms,
        matrices=whole.matrices,
        target=target if of_target is None else transform_model(target, of_target),
        target_transform=of_target,
    )


@dataclass(frozen=True)
class _Pair(Generic[M]):
    """Two models that fit: of one width and, if their symmetry has bases, in canonical form.

    Attributes:
        models: the one to permute, and the one to align it to.
        symmetry: of both.
        notes: what was done to them.
        is_checked: whether their values have been looked at.
    """

    models: tuple[M, M]
    symmetry: Symmetry
    notes: list[str]
    is_checked: bool


def _make_pair(
    model: M,
    to: M,
    example_inputs: Any,
    symmetry: Symmetry | None,
    kinds: Kinds,
    untie: bool,
    module: nn.Module | None,
    call: Call,
    engine: Engine,
) -> _Pair[M]:
    """Widen, check and fold two models, and find their symmetry."""
    notes: list[str] = []
    if isinstance(model, nn.Module) and isinstance(to, nn.Module) and is_narrower(model, to):
        inputs = find_example(example_inputs, call.data)
        if inputs is None:
            raise ValueError("the target has more units than the model: give example_inputs= or data= to widen it with")
        model, notes = widen(model, to, inputs), [WIDENED]
    is_checked = check_models(model, to, engine)
    if kinds == "all" and symmetry is None:
        (model, to), symmetry, changed = canonicalise([model, to], example_inputs, call.data, untie, module)
        notes += changed
    symmetry = find_symmetry([model, to], example_inputs, symmetry, call.data, kinds, module)
    for each in (model, to) if symmetry.bases else ():
        check_fixed(symmetry, read_state(each))
    return _Pair((model, to), symmetry, notes, is_checked)


def _choose_methods(
    call: Call, symmetry: Symmetry, pair: _Pair[Any], has_objective: bool, is_started: bool
) -> tuple[tuple[Method, ...], str]:
    """The methods in their order, and a note on why they were chosen; none if the user has named one."""
    if call.method is not None:
        return (call.method,), "" if call.is_named else f"{call.method.name} was chosen: the options are for it."
    goal = call.objective if has_objective else None
    model, to = pair.models
    has_data = call.data is not None and isinstance(model, nn.Module)
    advice = recommend(symmetry, read_state(model), read_state(to), goal, has_data, is_started)
    return advice.methods, str(advice)


def _reads_lazily(init: Permutation | Transform | Method) -> bool:
    return init.reads_lazily if isinstance(init, Method) else True


def transform_model(model: M, transform: Permutation | Transform) -> M:
    """A permuted or scaled copy: of a module a module, of a state a state."""
    moved = transform.apply(model)
    if not isinstance(model, nn.Module):
        return cast(M, moved)
    # What a deep copy takes in place of the model's own tensors, so that none is copied only to be written over.
    memo: dict[int, Any] = {}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers()) if type(tensor) in (Tensor, nn.Parameter)}
    others: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in own:
            others[key] = moved[key]
        elif id(value) not in memo:
            new = moved[key].clone() if moved[key].data_ptr() == value.data_ptr() else moved[key]
            memo[id(value)] = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new
    result = copy.deepcopy(model, memo)
    if others:
        result.load_state_dict(others, strict=False)
    return result
