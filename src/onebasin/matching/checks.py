"""What `align` and `merge` refuse before any work is done."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from onebasin.engines import LOCAL, Engine
from onebasin.engines.work_meter import CHECKING
from onebasin.landscape.batches import check_data, find_example
from onebasin.matching.methods import METHODS, Method, make_method
from onebasin.matching.methods.base import check_choice, check_count, check_flag
from onebasin.matching.recommendation import AUTO
from onebasin.matching.scaling import Scaling
from onebasin.relaxation.objectives import Objective, WeightDistance, as_objective
from onebasin.symmetries import Permutation, Symmetry, Transform
from onebasin.tensors.comparison import check_alike, check_finite
from onebasin.tensors.states import Model, State, read_state
from onebasin.tracing import Kinds
from onebasin.tracing import symmetry as trace


def check_models(source: Model, target: Model, engine: Engine = LOCAL) -> bool:
    """Refuse models that differ in keys or shapes, or hold NaN. The values of lazy states are left to `check_values`.

    Returns:
        Whether the values have been looked at.

    Raises:
        ValueError: naming the first difference.
    """
    states = _name_states(source, target)
    names = list(states)
    check_alike(states[names[0]], states[names[1]], *names)
    engine.check_states(states)
    if any(state.is_lazy for state in states.values()):
        return False
    check_values(source, target, engine)
    return True


def check_values(source: Model, target: Model, engine: Engine = LOCAL) -> None:
    """Refuse models that hold NaN or infinity.

    Raises:
        ValueError: naming the first such tensor.
    """
    states = _name_states(source, target)
    engine.meter.expect(CHECKING, sum(state.num_bytes for state in states.values()))
    with engine.broadcast(*states.values()):
        check_finite(states, functools.partial(engine.map, stage=CHECKING))


def _name_states(source: Model, target: Model) -> dict[str, State]:
    return {"the model to permute": read_state(source), "the model to align to": read_state(target)}


def check_engine(engine: Engine, methods: Sequence[Method], objective: Objective, symmetry: Symmetry | None) -> None:
    """Refuse what workers that read files cannot do.

    Args:
        engine: where the work is done; the local one does everything.
        methods: to align by.
        objective: to minimise.
        symmetry: of the models, if it is known.

    Raises:
        ValueError: saying what the engine serves.
    """
    if not engine.is_remote:
        return
    for method in methods:
        if not method.reads_lazily:
            raise ValueError(
                f"engine={engine.name!r} serves the method 'weight-matching', and {method.name} needs the networks in "
                "memory: take method='weight-matching' or engine='local'"
            )
    if type(objective) is not WeightDistance:
        raise ValueError(
            f"engine={engine.name!r} serves the objective WeightDistance, and {type(objective).__name__} runs the networks "
            "or is a function of whole states: take engine='local'"
        )
    if symmetry is not None and (symmetry.scales or symmetry.bases):
        raise ValueError(f"engine={engine.name!r} serves permutations alone: take kinds='permutation' or engine='local'")


@dataclass(frozen=True)
class Call:
    """The arguments that `align` and `merge` share, checked; see `align`.

    Attributes:
        method: None if it is to be chosen for the problem.
        is_named: whether the user named it; if not, and it is known, options are for it.
        init: a method by itself, not by its name.
        objective: never None.
        data: batches that can be read again and again: those of the call, or else those that came with the objective.
        groups: patterns of names.
    """

    method: Method | None
    is_named: bool
    init: Permutation | Transform | Method | None
    objective: Objective
    data: Iterable[Any] | None
    groups: list[str] | None


def check_call(
    models: Sequence[Model],
    /,
    *,
    symmetry: Any = None,
    method: Any = AUTO,
    objective: Any = None,
    data: Any = None,
    init: Any = None,
    groups: Any = None,
    kinds: Any = "permutation",
    untie: Any = False,
    module: Any = None,
    scaling: Any = None,
    seed: Any = 0,
    restarts: Any = 0,
    detect_copy: Any = True,
    polish: Any = None,
    progress: Any = False,
    callback: Any = None,
    engine: Any = None,
    **options: Any,
) -> Call:
    """Check what can be checked without tracing or running a model; the arguments are those of `align`.

    Args:
        models: those to permute.
        symmetry: likewise.
        method: likewise; without a name, options are for "sinkhorn".
        objective: likewise.
        data: likewise.
        init: likewise.
        groups: likewise.
        kinds: likewise.
        untie: likewise.
        module: likewise.
        scaling: likewise.
        seed: likewise.
        restarts: likewise.
        detect_copy: likewise.
        polish: likewise.
        progress: likewise.
        callback: likewise.
        engine: likewise.
        **options: likewise.

    Raises:
        ValueError: if something is missing or out of range.
        TypeError: if something is of the wrong kind.
    """
    if symmetry is not None and not isinstance(symmetry, Symmetry):
        raise TypeError(f"symmetry must come from onebasin.symmetry or Symmetry.from_axes, got {symmetry!r}")
    goal = as_objective(objective)
    named = None
    if method != AUTO:
        named = make_method(method, options)
    elif options:
        named = make_method("sinkhorn", options)
    check_choice("kinds", kinds, *get_args(Kinds))
    if kinds != "permutation" and symmetry is not None and not (symmetry.scales or symmetry.bases):
        missing = "positive scales" if kinds == "positive" else "positive scales or bases"
        raise ValueError(
            f"the symmetry that was given has no {missing}: make it by onebasin.symmetry(..., kinds={kinds!r}), "
            "or leave out one of symmetry= and kinds="
        )
    check_flag("untie", untie)
    if untie and (kinds != "all" or symmetry is not None):
        raise ValueError(
            "untie=True is for kinds='all' without symmetry=, where gains are folded into tied tensors: give kinds='all', "
            "or fold them by onebasin.canonical(..., untie=True) first"
        )
    check_module(module)
    if scaling is not None and not isinstance(scaling, Scaling):
        raise TypeError(f"scaling must be Scaling(...) or None, got {scaling!r}")
    if scaling is not None and scaling.both and not goal.uses_data:
        raise ValueError(
            "Scaling(both=True) moves both ends on a loss between them: give objective= and data=. A distance of weights "
            "would fall wherever both networks are scaled down, however different they are"
        )
    check_count("seed", seed)
    check_count("restarts", restarts, at_least=0)
    check_flag("detect_copy", detect_copy)
    check_flag("polish", polish, optional=True)
    if not callable(progress):
        check_flag("progress", progress)
    check_callback("callback", callback)
    call = Call(named, method != AUTO, _read_init(init), goal, _read_data(goal, data), _read_groups(groups))
    for each in (call.method, call.init):
        if isinstance(each, Method):
            _check_method_data(each, models, call.data)
    if isinstance(engine, Engine):
        methods = [each for each in (call.method, call.init) if isinstance(each, Method)]
        check_engine(engine, methods, call.objective, symmetry)
        if engine.is_remote and kinds != "permutation":
            raise ValueError(f"engine={engine.name!r} serves permutations alone: take kinds='permutation'")
        for model in models:
            engine.check_states({"the model": read_state(model)})
    return call


def check_callback(name: str, value: Any) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: saying so.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r}")


def _check_method_data(method: Method, models: Sequence[Model], data: Any) -> None:
    """Refuse a method that runs the networks where there are no modules or no data."""
    if method.looks_at_activations and (data is None or not all(isinstance(model, nn.Module) for model in models)):
        raise ValueError(f"{method.name} looks at activations: it needs modules, and data= with batches of inputs")


def _read_data(objective: Objective, data: Any) -> Iterable[Any] | None:
    """The batches of the call, or those that came with the objective."""
    data = objective.data if data is None else data
    if data is None and objective.needs_data:
        raise ValueError(f"{type(objective).__name__} needs data: give data=, an iterable of (inputs, target) batches")
    return None if data is None else check_data(data, objective.needs_target)


def _read_init(init: Any) -> Permutation | Transform | Method | None:
    if init is None or isinstance(init, Permutation | Transform | Method):
        return init
    if not isinstance(init, str) or init not in METHODS:
        raise ValueError(f"init must be a Permutation, a Transform or one of {', '.join(map(repr, METHODS))}, got {init!r}")
    return make_method(init, {})


def check_module(module: Any) -> None:
    """Refuse what is no module to trace in place of states."""
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module of the architecture of the states, got {type(module).__name__}")


def fit_start(init: Permutation | Transform | Method | None, symmetry: Symmetry) -> Permutation | Transform | Method | None:
    """A permutation or a transform to start from as an element of a symmetry; anything else as it is.

    Raises:
        ValueError: if it belongs to another symmetry.
    """
    if init is None or isinstance(init, Method):
        return init
    what = type(init).__name__.lower()
    if init.symmetry.groups != symmetry.groups:
        raise ValueError(f"the {what} given as init belongs to another symmetry: its groups differ")
    if isinstance(init, Permutation):
        return Permutation(symmetry, init.indices, check=False)
    permutation = Permutation(symmetry, init.permutation.indices, check=False)
    if init.is_permutation:
        return permutation
    own, given = ({**each.scales, **each.bases} for each in (symmetry, init.symmetry))
    for name in (*init.logarithms, *init.matrices):
        if own.get(name) != given[name]:
            raise ValueError(
                f"the transform given as init belongs to another symmetry: it multiplies units of {given[name].group!r} by "
                f"{name!r}, and here these cannot be multiplied so. It has to be of the same kinds="
            )
    return Transform(permutation, init.logarithms, init.matrices)


def _read_groups(groups: Any) -> list[str] | None:
    if groups is None or isinstance(groups, str):
        return None if groups is None else [groups]
    patterns = list(groups) if isinstance(groups, Iterable) else [groups]
    if not isinstance(groups, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"groups must be names of groups, or shell patterns such as 'conv*'; got {groups!r}")
    return patterns


def find_symmetry(
    models: Sequence[Model],
    example_inputs: Any,
    symmetry: Symmetry | None,
    data: Iterable[Any] | None,
    kinds: Kinds = "permutation",
    module: nn.Module | None = None,
) -> Symmetry:
    """The symmetry of models: traced, or as given. One written by hand is verified if inputs are known.

    Args:
        models: of one architecture; the first module among them is traced or verified.
        example_inputs: to trace or verify it with; those of the first batch of the data if None.
        symmetry: if it is known.
        data: batches, if any.
        kinds: see `onebasin.symmetry`.
        module: traced if all models are states.

    Raises:
        ValueError: if there is neither a symmetry nor anything to trace, if it does not hold, or if the states are not those
            of the module.
    """
    model = next((each for each in (*models, module) if isinstance(each, nn.Module)), models[0])
    example_inputs = find_example(example_inputs, data)
    if symmetry is not None:
        symmetry = symmetry.bind(model)
        if not symmetry.is_traced and isinstance(model, nn.Module) and example_inputs is not None:
            symmetry.verify(model, example_inputs)
        return symmetry
    if example_inputs is None or not isinstance(model, nn.Module):
        raise ValueError("give example_inputs= to trace the model with, and of states module=; or symmetry=")
    if module is not None and model is module:
        check_alike(read_state(models[0]), read_state(module), "the state", "module=")
    return trace(model, example_inputs, kinds=kinds)
