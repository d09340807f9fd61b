"""The oracle: f(permuted theta) = f(theta) in float64."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from onebasin.programs.calls import Call, derive_calls, read_calls
from onebasin.programs.failures import describe_error
from onebasin.programs.frontends import read_program
from onebasin.programs.graph import Program, ReplayError
from onebasin.programs.isolation import UnfusedAttention, isolated, quiet, run_module
from onebasin.programs.precision import Float64, compute_in_float64, promote
from onebasin.symmetries.structure import Group
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import LazyState, State, Ties, find_ties, read_state
from onebasin.torch_internals import tree_leaves, tree_map

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

    def random(self, generator: torch.Generator | None = None) -> Element:
        """A random element."""
        ...


def verify(symmetry: Verifiable, model: nn.Module, example_inputs: Any, tolerance: float = 1e-9) -> float:
    """Check a symmetry on a model's own weights; see `Symmetry.verify`."""
    state = read_state(model).lazily()
    if state.device.type == "meta":
        raise ValueError("a model on the meta device has no values: nothing can be verified on it")
    worst = 0.0
    for call in read_calls(example_inputs):
        try:
            function = _of_program(read_program(model, call))
        except ValueError:  # cannot be traced: the symmetry was written by hand
            function = _of_module(model, call)
        with isolated(model, call) as snapshot, snapshot.restoring_values():
            worst = max(worst, _check(symmetry, function, state, "this model's weights", tolerance))
    return worst


def verify_programs(
    symmetry: Verifiable,
    programs: Sequence[Program],
    state: State,
    tolerance: float = 1e-9,
) -> float:
    """Check a symmetry on random parameters and norm statistics: fresh norms and zero gates would hide errors."""
    functions = list(map(_of_program, programs))
    for scale in _SCALES:
        randomised = _randomise(symmetry, state, _find_buffers(programs), scale)
        try:
            return max((_check(symmetry, f, randomised, "random weights", tolerance) for f in functions), default=0.0)
        except Unstable:
            if scale == _SCALES[-1]:
                raise
    raise AssertionError


def find_guilty_groups(
    symmetry: Verifiable, model: nn.Module, call: Call, programs: Sequence[Program], state: State, tolerance: float = 1e-9
) -> list[str]:
    """Find the groups whose permutation changes what a module returns on random weights, at other sizes of the inputs.

    Nothing is found if the module takes no other sizes, or if its outputs are not finite or amplify rounding errors there.

    Raises:
        ValueError: if several groups together change it, but none of them alone.
    """
    max_trials = 4 if min((group.size for group in symmetry.groups.values()), default=0) < 4 else 1

    def find(function: Function) -> Different | None:
        for scale in _SCALES:
            randomised = _randomise(symmetry, state, _find_buffers(programs), scale)
            try:
                _check(symmetry, function, randomised, _OTHER_SIZES, tolerance, max_trials)
                return None
            except Unstable:
                continue
            except Different as error:
                return error
        return None

    for derived in derive_calls(call):
        try:
            with isolated(model, derived) as snapshot, snapshot.restoring_values():
                difference = find(_of_module(model, derived))
        except CannotVerify:
            continue
        if difference is not None:
            # A module may also keep its parameters where they cannot be replaced, such as in a list. A program does not.
            with contextlib.suppress(ValueError):
                difference = find(_of_program(read_program(model, derived)))
        if difference is not None and not difference.guilty:
            raise difference
        return difference.guilty if difference is not None else []
    return []


def _find_buffers(programs: Sequence[Program]) -> set[str]:
    return {key for program in programs for kind, key in program.inputs.values() if kind == InputKind.BUFFER}


def compare(
    model: nn.Module, first: Mapping[str, Any], second: Mapping[str, Any], example_inputs: Any, num_draws: int = 4
) -> float:
    """How far a model's outputs are apart with two states: the largest difference, relative to the output, in float64.

    Floating inputs are drawn anew each time, and keep their shapes; others stay as they are.

    Args:
        model: the architecture; the states are loaded into a copy of it.
        first: a state.
        second: another one.
        example_inputs: as for `onebasin.symmetry`.
        num_draws: how often inputs are drawn.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)

    calls = [
        Call(*tree_map(draw, (call.args, call.kwargs))) for call in read_calls(example_inputs) for _ in range(num_draws)
    ]
    model = copy.deepcopy(model).double()
    outputs = []
    for state in (first, second):
        model.load_state_dict(state)
        with isolated(model, calls[0]):
            outputs.append([_of_module(model, call)(read_state(model).load()) for call in calls])
    return max((_difference(*pair) for pair in zip(*outputs, strict=True)), default=0.0)


_SCALES = [5 * 0.6**attempt for attempt in range(4)]
"""Of random weights. The next one is tried if the network amplifies rounding errors."""
_OTHER_SIZES = "random weights at another batch size or sequence length"


class CannotVerify(ValueError):
    """A check that says nothing: the model fails, or its outputs are not finite, at these weights and inputs."""


class Unstable(CannotVerify):
    """The network amplifies rounding errors so much, at these weights, that they cannot be told from a wrong symmetry."""


class Different(ValueError):
    """A permutation changes the function.

    Attributes:
        guilty: the groups that change it alone.
    """

    def __init__(self, message: str, guilty: list[str]):
        super().__init__(message)
        self.guilty = guilty


def _of_program(program: Program) -> Function:
    return lambda state: program.run(state, compute_in_float64, promote)


def _of_module(model: nn.Module, call: Call) -> Function:
    """The function of a module that is `isolated`."""
    aliases = {key for keys in find_ties(model) for key in keys[1:]}
    call = Call(*tree_map(promote, (call.args, call.kwargs)))

    def function(state: Mapping[str, Tensor]) -> list[Tensor]:
        promoted = {key: promote(state[key]) for key in state if key not in aliases}
        try:
            with torch.no_grad(), UnfusedAttention(), seeded(0), Float64():
                result = run_module(model, call, state=promoted)
        except Exception as error:
            raise CannotVerify(f"the model fails: {describe_error(error)}") from error
        return [value for value in tree_leaves(result) if isinstance(value, Tensor)]

    return function


@quiet()  # apply warns of unreached parameters
def _check(
    symmetry: Verifiable, function: Function, state: LazyState, what: str, tolerance: float, max_trials: int = 8
) -> float:
    try:
        expected = function(state)
    except (ReplayError, CannotVerify) as error:
        raise CannotVerify(f"cannot run the model on {what} with these example inputs: {error}") from error
    if not all(bool(torch.isfinite(e).all()) for e in expected if e.is_floating_point()):
        raise CannotVerify(f"cannot verify on {what}: the model's output is not finite there; trace with verify=False")
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(min(max_trials, _num_trials(symmetry, state))):
        permutation = symmetry.random(generator)
        error = _difference(expected, function(permutation.apply(state)))
        worst = max(worst, error)
        if error <= tolerance:
            continue
        if error < 1e4 * _difference(expected, function(_jitter(state, generator))):
            raise Unstable(f"cannot verify on {what}: the model amplifies rounding errors there to {error:.1e} (relative)")
        guilty = [
            name
            for name in symmetry.groups
            if _difference(expected, function(permutation.only(name).apply(state))) > tolerance
        ]
        blame = ", ".join(map(repr, guilty)) or "no single group, but several together"
        raise Different(
            f"permuting changes the function on {what} by {error:.1e} (relative): {blame}. "
            "Written by hand, the symmetry claims too much; if it was traced, please report this network.",
            guilty,
        )
    return worst


def _num_trials(symmetry: Verifiable, state: State) -> int:
    """A permutation of few units can be the identity by chance: the smaller the groups, the more are tried.

    Large networks, where a trial takes long and groups that small are rare, are tried once or twice.
    """
    if min((group.size for group in symmetry.groups.values()), default=0) > 6:
        return 1
    return 8 if state.num_entries < 10**6 else 2


def _jitter(state: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Every number off by about its last digit: what rounding alone can do."""
    return {
        key: value.double() * (1 + 4e-16 * torch.randn(value.shape, generator=generator).to(value.device, torch.float64))
        if value.is_floating_point()
        else value
        for key, value in state.items()
    }


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference of two lists of outputs, each relative to its own size; integers must be equal."""
    worst = 0.0
    for e, f in zip(expected, found, strict=True):
        if not e.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(e, f) else float("inf"))
        elif e.numel():
            scale = float(e.abs().max())
            error = float((e - f).abs().max()) / scale if scale else float(f.abs().max())
            worst = max(worst, error if error == error else float("inf"))
    return worst


# Drawing a number takes longer than all else that is done with it, so a block of them is repeated. Its length is a prime:
# no two rows of a tensor are equal, unless it has more rows than that.
_NUM_DRAWN = 65537


@functools.cache
def _draw(device: torch.device, low: float, high: float) -> Tensor:
    drawn = torch.rand(2 * _NUM_DRAWN, generator=torch.Generator().manual_seed(0))
    return (drawn * (high - low) + low).to(device)


def _randomise(symmetry: Verifiable, state: State, buffers: set[str], scale: float) -> LazyState:
    """Weights at a scale that neither vanishes nor explodes with depth; buffers perturbed, variances kept positive.

    They are made where they are read, in float32: a second model is never held, and what is permuted is half as large.
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
        if not value.is_floating_point() or key in symmetry.unreached:
            return value
        if key in buffers:
            return value.float() * uniform(value, start, 0.5, 1.5) + uniform(value, start + _NUM_DRAWN // 2, 0.0, 0.1)
        if value.dim() < 2:
            return uniform(value, start, 0.5, 1.5)
        return uniform(value, start, -0.5, 0.5, scale / max(1, value.shape[1:].numel()) ** 0.5)

    return LazyState({key: value.to("meta") for key, value in shapes.items()}, read, state.device)
