"""The oracle: f(permuted theta) = f(theta) in float64."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from onebasin.programs.calls import Call, list_outputs, read_calls
from onebasin.programs.derivation import draw_inputs, perturb_inputs
from onebasin.programs.failures import describe_error
from onebasin.programs.frontends import read_program
from onebasin.programs.graph import Program, ReplayError
from onebasin.programs.isolation import UnfusedAttention, isolated, quiet, run_module
from onebasin.programs.precision import Float64, compute_in_float64, promote
from onebasin.symmetries.agreement import JITTER, amplification, is_close, relative_difference
from onebasin.symmetries.structure import Group
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import LazyState, State, Ties, find_ties, read_state
from onebasin.torch_internals import tree_map

Function = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""A model at fixed inputs: state -> all tensors it returns."""


class Element(Protocol):
    """One element of a group of transformations."""

    def apply(self, model: LazyState) -> LazyState:
        """The transformed state."""
        ...

    def only(self, group: str) -> Element:
        """The same element with all groups but one left as they are."""
        ...


class Verifiable(Protocol):
    """A symmetry, as far as it can be verified: groups, and random elements of them."""

    @property
    def groups(self) -> Mapping[str, Group]:
        """By name."""
        ...

    @property
    def ties(self) -> Ties:
        """State keys that are one tensor."""
        ...

    @property
    def unreached(self) -> tuple[str, ...]:
        """Parameters that no call uses."""
        ...

    @property
    def fixed(self) -> Mapping[str, float]:
        """Parameters that are filled with one number."""
        ...

    @property
    def rounding(self) -> float:
        """What elements may change, relative to the largest output: where units are mixed, zeros do not stay zero."""
        ...

    @property
    def change(self) -> str:
        """What elements do, for messages: "permuting", for example."""
        ...

    def random(self, generator: torch.Generator | None = None) -> Element:
        """A random element."""
        ...

    def random_cycles(self, generator: torch.Generator | None = None) -> Element:
        """A random element that moves every unit."""
        ...


def verify(symmetry: Verifiable, model: nn.Module, example_inputs: Any, tolerance: float = 1e-9) -> float:
    """Check a symmetry on a model's own weights; see `Symmetry.verify`."""
    state = read_state(model).lazily()
    if state.device.type == "meta":
        raise ValueError("a model on the meta device has no values: nothing can be verified on it")
    worst = 0.0
    for call in read_calls(example_inputs):
        try:
            function = function_of_program(read_program(model, call))
        except ValueError:  # cannot be traced: the symmetry was written by hand
            function = function_of(model, call)
        with isolated(model, call) as snapshot, snapshot.restoring_values():
            worst = max(worst, _check(symmetry, function, state, "this model's weights", tolerance))
    return worst


def verify_programs(
    symmetry: Verifiable, programs: Sequence[Program], state: State, tolerance: float = 1e-9, draw: bool = True
) -> float:
    """Check a symmetry on random parameters and norm statistics: fresh norms and zero gates would hide errors.

    Args:
        symmetry: what is checked.
        programs: calls of the model.
        state: the model's, for the shapes; where the model is not defined at random weights, its own are perturbed.
        tolerance: the largest difference of an entry of the outputs, relative to the entry.
        draw: run each call at random inputs too; a large model at random inputs alone.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        Different: naming the group to blame.
        CannotVerify: if the model fails, or returns no numbers, at all weights that were tried.
    """
    buffers = find_buffers(programs)
    states = list(random_states(symmetry, state, buffers))
    functions = [list(_functions_of(program, draw, state.num_entries > MAX_ENTRIES)) for program in programs]
    return max((_check_first(symmetry, some, states, tolerance) for some in functions), default=0.0)


def _functions_of(program: Program, draw: bool, is_large: bool) -> Iterator[Function]:
    """The function of a program at drawn inputs, at perturbed ones and at its own. The first that can be run says most."""
    if draw and any(kind == InputKind.USER_INPUT for kind, _ in program.inputs.values()):
        for given in (draw_inputs(program), perturb_inputs(program)):
            yield function_of_program(program, [given] if is_large else [program.given, given])
    yield function_of_program(program)


def _check_first(
    symmetry: Verifiable, functions: Sequence[Function], states: Sequence[Callable[[], LazyState]], tolerance: float
) -> float:
    """Check one function at the first state where it can be verified."""
    failure: CannotVerify | None = None
    for function, make_state in itertools.product(functions, states):
        try:
            return _check(symmetry, function, make_state(), "random weights", tolerance)
        except CannotVerify as error:
            failure = error
    assert failure is not None
    raise failure


def random_states(symmetry: Verifiable, state: State, buffers: set[str]) -> Iterator[Callable[[], LazyState]]:
    """Random states of a model at smaller and smaller scales, each made when it is called; the last is its own, perturbed.

    Args:
        symmetry: for its ties, and for what is left as it is: `unreached` and `fixed`.
        state: the model's, for the shapes.
        buffers: keys of buffers, which are perturbed.
    """
    return (functools.partial(_randomise, symmetry, state, buffers, scale) for scale in _SCALES)


def is_stable(functions: Sequence[Function], state: LazyState) -> bool:
    """Whether functions return finite numbers at a state, and do not amplify rounding errors beyond use."""
    for function in functions:
        expected, noise = function(state), function(_jitter(state))
        if (
            not all(bool(value.isfinite().all()) for value in expected)
            or amplification(expected, noise) > _MAX_AMPLIFICATION
        ):
            return False
    return True


def find_buffers(programs: Sequence[Program]) -> set[str]:
    """The keys of buffers that programs read."""
    return {key for program in programs for kind, key in program.inputs.values() if kind == InputKind.BUFFER}


def redrawn_functions(programs: Sequence[Program], num_draws: int = 4) -> list[Function]:
    """The functions of programs in float64, each at several values of its floating inputs; others stay as they are."""
    generator = torch.Generator().manual_seed(0)

    def draw(program: Program) -> dict[str, Any]:
        inputs = {name for name, (kind, _) in program.inputs.items() if kind == InputKind.USER_INPUT}
        return {name: _draw_floating(value, generator) if name in inputs else value for name, value in program.given.items()}

    functions = []
    for program in programs:
        drawn = [draw(program) for _ in range(num_draws)]
        is_drawn = any(drawn[0][name] is not value for name, value in program.given.items())
        functions.append(function_of_program(program, drawn if is_drawn else ()))
    return functions


def compare(
    functions: Sequence[Function],
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    others: Sequence[Function] | None = None,
) -> float:
    """How far the outputs of functions are apart at two states: the largest difference, relative to the output.

    Of lazy states a few tensors are in memory at a time.

    Args:
        functions: of a model.
        first: a state.
        second: another one.
        others: at the second state take these functions.
    """
    pairs = zip(functions, functions if others is None else others, strict=True)
    return max((relative_difference(function(first), other(second)) for function, other in pairs), default=0.0)


def compare_models(first: nn.Module, second: nn.Module, example_inputs: Any, num_draws: int = 4) -> float:
    """How far the outputs of two models are apart: the largest difference, relative to the output, in float64.

    Floating inputs are drawn anew each time, and keep their shapes; others stay as they are.

    Args:
        first: a model.
        second: another one, which may have other shapes.
        example_inputs: as for `onebasin.symmetry`.
        num_draws: how often inputs are drawn.
    """
    calls = _draw_calls(example_inputs, num_draws)
    outputs = [_run(copy.deepcopy(model).double(), calls) for model in (first, second)]
    return max((relative_difference(*pair) for pair in zip(*outputs, strict=True)), default=0.0)


def _draw_calls(example_inputs: Any, num_draws: int) -> list[Call]:
    generator = torch.Generator().manual_seed(0)

    def draw(value: Any) -> Any:
        return _draw_floating(value, generator)

    return [Call(*tree_map(draw, (call.args, call.kwargs))) for call in read_calls(example_inputs) for _ in range(num_draws)]


def _draw_floating(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)


def _run(model: nn.Module, calls: Sequence[Call]) -> list[list[Tensor]]:
    with isolated(model, calls[0]):
        return [function_of(model, call)(read_state(model).load()) for call in calls]


MAX_ENTRIES = 10**7
"""Of the state of a small model. Larger ones are run at as few inputs as possible."""
_SCALES = [*(5 * 0.6**attempt for attempt in range(4)), None]
"""Of random weights; None perturbs the model's own. The next one is tried if the network amplifies rounding errors."""
_MAX_AMPLIFICATION = 1e5
"""Of rounding errors. Beyond it they cannot be told from a wrong symmetry."""


class CannotVerify(ValueError):
    """A check that says nothing: the model fails, or its outputs are not finite, at these weights and inputs."""


class Unstable(CannotVerify):
    """The network amplifies rounding errors so much, at these weights, that they cannot be told from a wrong symmetry."""


class Different(ValueError):
    """An element of the symmetry changes the function.

    Attributes:
        guilty: the groups that change it alone.
    """

    def __init__(self, message: str, guilty: list[str]):
        super().__init__(message)
        self.guilty = guilty


def function_of_program(program: Program, given: Sequence[Mapping[str, Any]] = ()) -> Function:
    """The function of a program in float64; see `Program.run`."""
    return lambda state: program.run(state, compute_in_float64, promote, given)


def function_of(model: nn.Module, call: Call) -> Function:
    """The function of a module that is `isolated`, in float64.

    It raises `CannotVerify` if the module fails.
    """
    aliases = {key for keys in find_ties(model) for key in keys[1:]}
    call = Call(*tree_map(promote, (call.args, call.kwargs)))

    def function(state: Mapping[str, Tensor]) -> list[Tensor]:
        promoted = {key: promote(state[key]) for key in state if key not in aliases}
        try:
            with torch.no_grad(), UnfusedAttention(), seeded(0), Float64():
                result = run_module(model, call, state=promoted)
        except Exception as error:
            raise CannotVerify(f"the model fails: {describe_error(error)}") from error
        return [value for value in list_outputs(result) if isinstance(value, Tensor)]

    return function


@quiet()  # apply warns of unreached parameters
def _check(symmetry: Verifiable, function: Function, state: LazyState, what: str, tolerance: float) -> float:
    try:
        expected = function(state)
    except (ReplayError, CannotVerify) as error:
        raise CannotVerify(f"cannot run the model on {what} with these example inputs: {error}") from error
    if any(value.numel() and bool(value.isnan().all()) for value in expected):
        raise CannotVerify(f"cannot verify on {what}: an output is not a number there; give inputs where it is defined")
    generator = torch.Generator().manual_seed(0)
    worst, noise = 0.0, None
    for trial in range(_num_trials(symmetry, state)):
        permutation = symmetry.random(generator) if trial else symmetry.random_cycles(generator)
        found = function(permutation.apply(state))
        worst = max(worst, relative_difference(expected, found))
        if is_close(expected, found, tolerance) or relative_difference(expected, found) < symmetry.rounding:
            continue
        noise = noise or function(_jitter(state))
        if (factor := amplification(expected, noise)) > _MAX_AMPLIFICATION:
            raise Unstable(f"cannot verify on {what}: the model amplifies rounding errors there {factor:.0e} times")
        if is_close(expected, found, tolerance, noise):
            continue
        guilty = [
            name
            for name in symmetry.groups
            if not is_close(expected, function(permutation.only(name).apply(state)), tolerance, noise)
        ]
        blame = ", ".join(map(repr, guilty)) or "no single group, but several together"
        raise Different(
            f"{symmetry.change} changes the function on {what} by {relative_difference(expected, found):.1e} (relative): "
            f"{blame}. "
            "Written by hand, the symmetry claims too much; if it was traced, please report this network.",
            guilty,
        )
    return worst


def _num_trials(symmetry: Verifiable, state: State) -> int:
    """So many that two groups of the smallest size are not permuted alike every time, but for one in a thousand networks.

    Large networks, where a trial takes long and groups that small are rare, are tried once or twice.
    """
    smallest = min((group.size for group in symmetry.groups.values()), default=7)
    trials = 1 if smallest > 6 else math.ceil(math.log(1000) / math.lgamma(smallest + 1)) if smallest > 1 else 1
    return min(trials, 2 if state.num_entries > MAX_ENTRIES else 8)


def _jitter(state: LazyState) -> LazyState:
    """Every number off by about its last digit: what rounding alone can do."""
    numbers = {key: number for number, key in enumerate(state)}

    def shake(key: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        generator = torch.Generator().manual_seed(numbers[key])
        shaken = torch.randn(value.shape, generator=generator).to(value.device, torch.float64)
        return shaken.mul_(JITTER).mul_(value).add_(value)  # in place: an embedding is most of a model

    return state.map(shake)


# Drawing a number takes longer than all else that is done with it, so a block of them is repeated. Its length is a prime:
# no two rows of a tensor are equal, unless it has more rows than that.
_NUM_DRAWN = 65537


@functools.cache
def _draw(device: torch.device, low: float, high: float) -> Tensor:
    drawn = torch.rand(2 * _NUM_DRAWN, generator=torch.Generator().manual_seed(0))
    return (drawn * (high - low) + low).to(device)


def _randomise(symmetry: Verifiable, state: State, buffers: set[str], scale: float | None) -> LazyState:
    """Weights at a scale that neither vanishes nor explodes with depth, or perturbed; buffers perturbed, variances positive.

    They are made where they are read, in float32: a second large model is never held, and what is permuted is half as large.
    """
    alias = {key: keys[0] for keys in symmetry.ties for key in keys}
    shapes = state.shapes
    starts = dict(zip(shapes, itertools.accumulate(value.numel() for value in shapes.values()), strict=True))

    def uniform(value: Tensor, start: int, low: float, high: float, factor: float | None = None) -> Tensor:
        block = _draw(value.device, low, high)[start % _NUM_DRAWN :][: min(value.numel(), _NUM_DRAWN)]
        block = block if factor is None else block * factor
        if value.numel() > _NUM_DRAWN:
            block = block.repeat(-(-value.numel() // _NUM_DRAWN))[: value.numel()]
        return block.view(value.shape)

    def read(key: str) -> Tensor:
        key = alias.get(key, key)
        value, start = state[key], starts[key]
        if not value.is_floating_point() or value.layout != torch.strided or key in (*symmetry.unreached, *symmetry.fixed):
            return value
        if key in buffers or scale is None:
            return value.float() * uniform(value, start, 0.5, 1.5) + uniform(value, start + _NUM_DRAWN // 2, 0.0, 0.1)
        if value.dim() < 2:
            return uniform(value, start, 0.5, 1.5)
        return uniform(value, start, -0.5, 0.5, scale / max(1, value.shape[1:].numel()) ** 0.5)

    read = read if state.num_entries > MAX_ENTRIES else functools.cache(read)
    return LazyState({key: value.to("meta") for key, value in shapes.items()}, read, state.device)
