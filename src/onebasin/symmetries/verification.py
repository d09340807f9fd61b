"""The oracle: f(permuted theta) = f(theta) in float64."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from onebasin.programs.frontends import read_program
from onebasin.programs.graph import Call, Program, evaluation_mode, read_calls
from onebasin.programs.precision import Float64, compute_in_float64, promote
from onebasin.symmetries.structure import Group
from onebasin.tensors.seeding import seeded
from onebasin.tensors.states import LazyState, State, Ties, read_state
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
        worst = max(worst, _check(symmetry, function, state, "this model's weights", tolerance))
    return worst


def verify_programs(
    symmetry: Verifiable,
    programs: Sequence[Program],
    state: State,
    tolerance: float = 1e-9,
) -> float:
    """Check a symmetry on random parameters and norm statistics: fresh norms and zero gates would hide errors."""
    kinds = {key: kind for program in programs for kind, key in program.inputs.values()}
    buffers = {key for key, kind in kinds.items() if kind == InputKind.BUFFER}
    for attempt in range(_NUM_ATTEMPTS):
        randomised = _randomise(symmetry, state, buffers, scale=5 * 0.6**attempt)
        worst = 0.0
        try:
            for program in programs:
                worst = max(worst, _check(symmetry, _of_program(program), randomised, "random weights", tolerance))
            return worst
        except Unstable:
            if attempt == _NUM_ATTEMPTS - 1:
                raise
    raise AssertionError


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
        outputs.append([_of_module(model, call)(read_state(model).load()) for call in calls])
    return max((_difference(*pair) for pair in zip(*outputs, strict=True)), default=0.0)


_NUM_ATTEMPTS = 4


class Unstable(ValueError):
    """The network amplifies rounding errors so much, at these weights, that they cannot be told from a wrong symmetry."""


def _of_program(program: Program) -> Function:
    return lambda state: program.run(state, compute_in_float64, promote)


def _of_module(model: nn.Module, call: Call) -> Function:
    def function(state: Mapping[str, Tensor]) -> list[Tensor]:
        args, kwargs = tree_map(promote, (call.args, call.kwargs))
        promoted = {key: promote(value) for key, value in state.items()}
        with evaluation_mode(model), torch.no_grad(), seeded(0), Float64():
            result = torch.func.functional_call(model, promoted, args, kwargs)
        return [value for value in tree_leaves(result) if isinstance(value, Tensor)]

    return function


def _check(symmetry: Verifiable, function: Function, state: LazyState, what: str, tolerance: float) -> float:
    try:
        expected = function(state)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"cannot run the model on {what} with these example inputs: {error}") from error
    if not all(bool(torch.isfinite(e).all()) for e in expected if e.is_floating_point()):
        raise ValueError(f"cannot verify on {what}: the model's output is not finite there; trace with verify=False")
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(_num_trials(symmetry, state)):
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
        raise ValueError(
            f"permuting changes the function on {what} by {error:.1e} (relative): {blame}. "
            "Written by hand, the symmetry claims too much; if it was traced, please report this network."
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
