"""Bring one model into the basin of another: check everything, solve, apply."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import check_rereadable
from onebasin.matching import METHODS, Found, Problem
from onebasin.relaxation.hardening import plan_shape
from onebasin.relaxation.objectives import WeightDistance, parameter_keys
from onebasin.symmetries.permutation import Permutation
from onebasin.symmetries.structure import Symmetry
from onebasin.tensors.lazy import LazyState, make_lazy, open_state
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import State, read_state
from onebasin.torch_internals import tree_map
from onebasin.tracing import symmetry as trace


@dataclass(frozen=True)
class Alignment:
    """What `align` found.

    Attributes:
        model: a copy of the model, permuted (of a state dict, the permuted state dict; of a lazy state, a lazy one).
        permutation: what was done to it.
        cost: the objective of the permuted model beside the target.
        start_cost: the objective before.
        history: an entry a step or sweep.
        converged: whether the method stopped by itself, not by its limit.
        seconds: how long it took.
        method: by which method.
        logits: of "sinkhorn", where its descent ended: give them as ``logits=`` (with the same `init`) to go on from there.
    """

    model: Any
    permutation: Permutation
    cost: float
    start_cost: float
    history: list[dict[str, Any]]
    converged: bool
    seconds: float
    method: str
    logits: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        ended = "converged" if self.converged else "stopped at its limit"
        change = f"cost {self.start_cost:.6g} -> {self.cost:.6g}"
        return f"Alignment({self.method}: {change}, {ended} after {self.seconds:.2f} s, {self.permutation!r})"


def align(
    model: nn.Module | Mapping[str, Any],
    to: nn.Module | Mapping[str, Any],
    example_inputs: Any = None,
    symmetry: Symmetry | None = None,
    method: str = "sinkhorn",
    objective: Callable[..., Tensor] | None = None,
    data: Iterable[Any] | None = None,
    init: Permutation | str | None = None,
    groups: Iterable[str] | None = None,
    seed: int = 0,
    restarts: int = 0,
    progress: bool = False,
    callback: Callable[[dict[str, Any]], None] | None = None,
    track: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Alignment:
    """Permute a model's hidden units so that it costs least beside another one.

    Args:
        model: the model to permute; it is left untouched. Lazy states, such as checkpoints, are read tensor by tensor if the
            method is "weight-matching" and the objective `WeightDistance`, and are loaded otherwise.
        to: the model to align it to, of the same architecture. Their types and devices may differ.
        example_inputs: to trace the symmetry with; not needed if `symmetry` is given.
        symmetry: from `onebasin.symmetry` or `Symmetry.from_axes`.
        method: "sinkhorn" (the paper), "weight-matching", "activation-matching" (needs `data`) or "ste".
        objective: what to minimise: `WeightDistance`, `Midpoint`, `RandomPoint`, or any callable
            ``(params, target, batch) -> scalar``; `WeightDistance()` if None.
        data: an iterable of (inputs, target) batches that can be read more than once, such as a list or a loader.
        init: start from this permutation, or from what another method finds; the result costs no more than that.
        groups: decide only the groups whose names match one of these (shell patterns); the others stay as they are.
        seed: for everything random.
        restarts: further runs, each from a random permutation, until none can cost less; the best result is kept.
        progress: show a progress line.
        callback: called with every entry of the history.
        track: called during the work with what is being done, how much of it is done, and how much there is.
        **options: of the method; see `onebasin.matching`.

    Raises:
        ValueError: before any work is done, if the two do not fit, hold NaN, or something is missing.

    >>> import onebasin as ob
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> x = torch.zeros(1, 4)
    >>> twin = copy.deepcopy(mlp)
    >>> _ = twin.load_state_dict(ob.symmetry(mlp, x).random().apply(mlp))
    >>> ob.align(twin, to=mlp, example_inputs=x).cost
    0.0
    """
    begin = time.perf_counter()
    objective = WeightDistance() if objective is None else objective
    data = getattr(objective, "data", None) if data is None else data
    if not (method == "weight-matching" and isinstance(objective, WeightDistance)):
        model, to = (m.load() if isinstance(m, LazyState) else m for m in (model, to))
    _check_arguments(model, to, method, objective, data, options)
    symmetry = _find_symmetry(model, example_inputs, symmetry)
    chosen = symmetry.restrict(groups)

    def run(other: str) -> Permutation:
        return align(
            model, to, None, symmetry, other, objective, data, None, groups, seed, 0, progress, callback, track
        ).permutation

    first = _initial(init, symmetry, run)
    generator = torch.Generator().manual_seed(seed)
    random = [Permutation(symmetry, {**first.indices, **chosen.random(generator).indices}) for _ in range(restarts)]
    best: tuple[Found, Permutation] | None = None
    start_cost = math.nan
    report = _reporter(progress, callback)
    for attempt, start in enumerate([first, *random]):
        problem = _problem(model, to, chosen, start, objective, data, seed + attempt, report)
        problem = problem if track is None else replace(problem, track=track)
        if attempt == 0:
            start_cost = problem.cost(chosen.identity())
            if method == "sinkhorn":
                _check_memory(chosen, problem)
        with seeded(seed + attempt, problem.device):
            if chosen.groups:
                found = METHODS[method](problem, **options)
            else:  # nothing is free: the model is as close as it can be
                found = Found(chosen.identity(), problem.cost(chosen.identity()), [], converged=True)
        if attempt == 0 and init is not None and found.cost > start_cost:
            # A method that looks at something else than the objective may end higher: then the start is the answer.
            found = replace(found, permutation=chosen.identity(), cost=start_cost)
        if best is None or found.cost < best[0].cost:
            best = found, start
        if found.cost <= problem.floor:
            break
    assert best is not None
    found, start = best
    permutation = Permutation(symmetry, {**symmetry.identity().indices, **found.permutation.indices}) @ start
    if progress:
        print(file=sys.stderr)
    return Alignment(
        model=_permuted(model, permutation),
        permutation=permutation,
        cost=found.cost,
        start_cost=start_cost,
        history=found.history,
        converged=found.converged,
        seconds=time.perf_counter() - begin,
        method=method,
        logits=found.logits,
    )


def _permuted(model: Any, permutation: Permutation) -> Any:
    moved = permutation.apply(model)
    if not isinstance(model, nn.Module):
        return moved
    # What a deep copy takes in place of the model's own tensors, so that none is copied only to be written over.
    memo: dict[int, Any] = {}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers()) if type(tensor) in (Tensor, nn.Parameter)}
    others: State = {}
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


def _check_arguments(model: Any, to: Any, method: str, objective: Any, data: Any, options: Mapping[str, Any]) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    known = list(inspect.signature(METHODS[method]).parameters)[1:]
    for name in options:
        if name not in known:
            raise TypeError(f"{method!r} has no option {name!r}; it has {', '.join(known)}")
    check_same_architecture(open_state(model), open_state(to))
    if getattr(objective, "needs_data", False) and data is None:
        raise ValueError(f"{type(objective).__name__} needs data: give data=, an iterable of (inputs, target) batches")
    if method == "activation-matching" and (data is None or not isinstance(model, nn.Module)):
        raise ValueError("activation-matching looks at activations: it needs modules, and data= with batches of inputs")
    if data is not None:
        check_rereadable(data)


def _reporter(progress: bool, callback: Callable[[dict[str, Any]], None] | None) -> Callable[[dict[str, Any]], None]:
    def report(entry: dict[str, Any]) -> None:
        if callback is not None:
            callback(entry)
        if progress:
            text = ", ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in entry.items())
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return report


def check_same_architecture(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Refuse states that differ in keys or shapes, or hold NaN, naming the first difference."""
    sums: list[tuple[str, str, Tensor]] = []
    for key in target:
        if key not in source:
            raise ValueError(
                f"the model to permute has no {key!r}, the one to align to has: they are different architectures"
            )
    for key, value in source.items():
        if key not in target:
            raise ValueError(
                f"the model to align to has no {key!r}, the one to permute has: they are different architectures"
            )
        if not isinstance(value, Tensor):
            continue
        theirs = target[key]
        if value.shape != theirs.shape:
            raise ValueError(f"{key!r} has shape {tuple(value.shape)} in one model and {tuple(theirs.shape)} in the other")
        for which, tensor in (("to permute", value), ("to align to", theirs)):
            if tensor.is_meta:
                raise ValueError(f"the model {which} is on the meta device: it has no values to align")
            if tensor.is_floating_point():
                sums.append((key, which, tensor.sum()))
    # What is not finite shows in the sum. The converse fails where a sum of large numbers overflows: look at each then.
    for key, which, total in sums if not _are_finite([total for _, _, total in sums]) else ():
        tensor = (source if which == "to permute" else target)[key]
        if not total.isfinite() and not tensor.isfinite().all():
            raise ValueError(f"{key!r} of the model {which} holds NaN or infinity")


def _are_finite(numbers: Sequence[Tensor]) -> bool:
    """Of all at once: a GPU is waited for once a type of them."""
    alike: dict[Any, list[Tensor]] = {}
    for number in numbers:
        alike.setdefault((number.device, number.dtype), []).append(number)
    return all(bool(torch.stack(some).isfinite().all()) for some in alike.values())


def _find_symmetry(model: Any, example_inputs: Any, symmetry: Symmetry | None) -> Symmetry:
    if symmetry is not None:
        return symmetry.bind(model)
    if example_inputs is None or not isinstance(model, nn.Module):
        raise ValueError("give example_inputs= to trace the model with, or symmetry=")
    return trace(model, example_inputs)


def _initial(init: Permutation | str | None, symmetry: Symmetry, run: Callable[[str], Permutation]) -> Permutation:
    if init is None:
        return symmetry.identity()
    if isinstance(init, str):
        if init not in METHODS:
            raise ValueError(f"init must be a Permutation or one of {', '.join(map(repr, METHODS))}, got {init!r}")
        return run(init)
    if init.symmetry.groups != symmetry.groups:
        raise ValueError("the permutation given as init belongs to another symmetry: its groups differ")
    return init


def _problem(
    model: Any,
    to: Any,
    symmetry: Symmetry,
    first: Permutation,
    objective: Any,
    data: Any,
    seed: int,
    report: Callable[[dict[str, Any]], None],
) -> Problem:
    if isinstance(model, LazyState) or isinstance(to, LazyState):
        return _lazy_problem(make_lazy(model), make_lazy(to), symmetry, first, objective, seed, report)
    target = read_state(to)
    source = first.apply(model)
    keys = tuple(parameter_keys(model))
    if not keys:
        raise ValueError("the model has no floating parameters to align")
    dtype = torch.promote_types(torch.float32, torch.promote_types(source[keys[0]].dtype, target[keys[0]].dtype))
    device = target[keys[0]].device

    def convert(state: State) -> State:
        done: dict[int, Any] = {}
        for value in state.values():
            if id(value) not in done and isinstance(value, Tensor):
                done[id(value)] = value.to(device, dtype if value.is_floating_point() else None)
        return {key: done.get(id(value), value) for key, value in state.items()}

    module = None
    if isinstance(model, nn.Module):
        module = to if isinstance(to, nn.Module) else model
        if data is not None:  # it will be run
            module = copy.deepcopy(module).to(device, dtype)
    bound = objective.bind(module if module is not None else source) if hasattr(objective, "bind") else objective
    batches = None if data is None else _Moved(data, device, dtype)
    return Problem(symmetry, convert(source), convert(target), keys, bound, batches, module, seed, report)


def _lazy_problem(
    model: LazyState,
    to: LazyState,
    symmetry: Symmetry,
    first: Permutation,
    objective: WeightDistance,
    seed: int,
    report: Callable[[dict[str, Any]], None],
) -> Problem:
    repeated = {key for tied in symmetry.ties for key in [k for k in tied if k in to][1:]}
    keys = tuple(key for key in parameter_keys(to) if key not in repeated)
    if not keys:
        raise ValueError("the model has no floating parameters to align")
    types = [state.shapes[key].dtype for state in (model, to) for key in keys]
    dtype = torch.float64 if torch.float64 in types else torch.float32
    source, target = (state.to(to.device, dtype) for state in (first.apply(model), to))
    bound = objective if objective.keys is not None else replace(objective, keys=keys)
    return Problem(symmetry, source, target, keys, bound, seed=seed, report=report)


@dataclass(frozen=True)
class _Moved:
    """Batches on the computing device, their floating tensors in the computing type."""

    data: Iterable[Any]
    device: torch.device
    dtype: torch.dtype

    def __iter__(self):
        for batch in self.data:
            yield tree_map(self._move, batch)

    def _move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)


def _check_memory(symmetry: Symmetry, problem: Problem) -> None:
    """Refuse plans that cannot fit: logits, gradient and two moments of Adam, and four matrices of work for the operator."""
    entries = sum(_product(plan_shape(symmetry, g)) for g in symmetry.groups.values())
    needed = 8 * entries * problem.target[problem.keys[0]].element_size()
    available = _available_memory(problem.device)
    if available is not None and needed > available:
        raise ValueError(
            f"the plans need about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free: "
            "use method='weight-matching', or choose fewer groups="
        )


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _available_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
