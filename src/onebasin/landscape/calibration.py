"""The statistics of hidden units, corrected after weights were mixed: REPAIR and its relatives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from onebasin.landscape.batch_norm import batch_norms, estimating, reset_statistics
from onebasin.landscape.batches import StopForward, check_data, copy_model, run_batches
from onebasin.landscape.bias_calibration import calibrate_biases
from onebasin.landscape.filter_norms import keep_norms
from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import names
from onebasin.tensors.interpolation import check_weights, read_alike
from onebasin.tensors.states import Model, State, StateDict, read_state_dict
from onebasin.torch_internals import BatchNorm, Convolution

# Layers that compute y = W x + b along the first axis of W. A subclass that computes something else is left alone.
_PLAIN = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)

RepairForm = Literal["repair", "rescale", "closed-form", "norms", "bias"]
"""What is corrected, and from what; see `repair`."""
DATA_FREE: tuple[RepairForm, ...] = ("norms", "bias")
"""Forms that need no data."""


def check_form(name: str, form: Any) -> None:
    """Refuse what is no form of repair.

    Args:
        name: of the argument.
        form: its value.

    Raises:
        ValueError: with the forms.
    """
    if form not in get_args(RepairForm):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(RepairForm)))}, got {form!r}")


class Statistics(NamedTuple):
    """Mean and standard deviation of each unit, in float64."""

    mean: Tensor
    std: Tensor


class Moments:
    """Mean and variance of units over any number of batches, merged as Chan, Golub and LeVeque (1979) do, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> Statistics:
        """Take in a batch (samples, units), and return its own statistics."""
        values = values.double()
        count, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        total, delta = self.count + count, mean - self.mean.to(mean.device)
        self.squares = self.squares.to(mean.device) + squares + delta.square() * (self.count * count / total)
        self.mean = self.mean.to(mean.device) + delta * (count / total)
        self.count = total
        return Statistics(mean, (squares / count).sqrt())

    def result(self) -> Statistics:
        """Of all batches so far."""
        return Statistics(self.mean, (self.squares / self.count).sqrt())


@dataclass(frozen=True)
class Repair:
    """What `repair` did.

    Attributes:
        state: the repaired state.
        repaired: modules whose weight and bias, or bias alone, were corrected.
        norms: batch norms whose statistics were estimated anew.
        skipped: modules that make free units and could not be repaired, and why.
        mismatch: the largest difference of a repaired unit's mean or standard deviation to its goal, relative to the typical
            standard deviation of its layer; NaN for forms that do not measure the mixed network.
    """

    state: StateDict
    repaired: tuple[str, ...]
    norms: tuple[str, ...]
    skipped: Mapping[str, str]
    mismatch: float


def repair(
    model: nn.Module,
    endpoints: Sequence[Model],
    data: Iterable[Any] | None,
    symmetry: Symmetry,
    weights: Sequence[float] | None = None,
    tolerance: float = 1e-3,
    form: RepairForm = "repair",
) -> Repair:
    """REPAIR (Jordan et al. 2022, arXiv 2211.08403): undo the collapse of variance that mixing weights causes.

    Each hidden unit x of the mixed network gets the interpolated statistics of the endpoints,

        mean(x) = sum_i w_i mean(x_i),   std(x) = sum_i w_i std(x_i),

    by a scale and a shift that are folded into the weight and bias of the linear or convolutional layer that makes it. As in
    the paper one pass corrects all layers, each batch by its own statistics, so that a layer sees repaired inputs; that is
    exact for one batch. If the statistics of all batches together then miss their goals, layers are corrected one after
    the other, in the order of their calls, with a (partial) pass for each. A layer with a batch norm right behind it already
    has the interpolated scale and shift: there the norm's statistics are estimated anew.

    Other forms:

    - "rescale": each unit is multiplied to have the interpolated standard deviation, and gets no shift (RESCALE, Qu and
      Horvath 2024, arXiv 2402.05966).
    - "closed-form": the standard deviation of a mixed unit is taken to be that of the mixed activations, which follows from
      the correlations between the endpoints, so that the mixed network is not run.
    - "norms": no data; each filter is scaled to the interpolated norm of the endpoints' filters (`keep_norms`).
    - "bias": no data; the biases of a chain of layers without norms shrink with depth (`calibrate_biases`).

    Args:
        model: the mixed network; left untouched.
        endpoints: the networks it was mixed from, aligned: modules or state dicts.
        data: batches to measure on, each inputs or a pair (inputs, target); read several times. None for "norms" and "bias".
        symmetry: says which layers make hidden units.
        weights: how the endpoints were mixed; equal if not given.
        tolerance: how large a `Repair.mismatch` to accept after the first pass; infinity is the paper's single pass.
        form: "repair", "rescale", "closed-form", "norms" or "bias".

    Raises:
        ValueError: if nothing can be repaired, saying why.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> x = torch.randn(64, 4)
    >>> middle = ob.merge([a, b], example_inputs=x)
    >>> _ = middle.load_state_dict(ob.repair(middle, [a, b], [x], ob.symmetry(a, x)).state)
    """
    if not endpoints:
        raise ValueError("there are no endpoints: give the networks that the model was mixed from")
    weights = check_weights(weights, len(endpoints))
    if min(weights) < 0 or not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise ValueError(f"weights must not be negative and must sum to one, got {weights}")
    check_form("form", form)
    mixed, *states = read_alike([model, *endpoints])
    symmetry = symmetry.bind(model)
    if form == "bias":
        state, layers = calibrate_biases(mixed, states, weights, symmetry)
        return Repair(state, layers, (), {}, math.nan)
    if form == "norms":
        layers, skipped = _find_filters(model, symmetry)
        return Repair(keep_norms(mixed, states, weights, layers), tuple(layers), (), skipped, math.nan)
    if data is None:
        raise ValueError(f"{form!r} measures the units: give batches of data, or take the form 'norms', which needs none")
    data = check_data(data)
    ours = copy_model(model)
    norms = batch_norms(ours)
    axes, skipped = find_layers(ours, symmetry, data)
    if not axes and not norms:
        reasons = "; ".join(f"{path}: {why}" for path, why in skipped.items())
        raise ValueError(f"there is no layer to repair ({reasons or 'no linear or convolutional layer makes free units'})")
    goals = {}
    if axes:
        found = []
        for state in states:
            ours.load_state_dict(state.load())
            found.append(measure_units(ours, axes, data))
        goals = {path: _average([f[path] for f in found], weights) for path in axes}
    expected = _measure_mixed_units(ours, states, weights, axes, data) if form == "closed-form" else None
    ours.load_state_dict(mixed.load())
    corrections = _Corrections(ours, norms, axes, goals, data, shifts=form != "rescale")
    if expected is None:
        mismatch = corrections.find(tolerance)
    else:
        corrections.fold(expected)
        reset_statistics(ours, data)
        mismatch = math.nan
    return Repair(read_state_dict(ours), tuple(axes), tuple(norms), skipped, mismatch)


def repair_in_place(model: nn.Module, *args: Any, **options: Any) -> None:
    """`repair`, loaded into the mixed network itself: one of ours."""
    model.load_state_dict(repair(model, *args, **options).state)


def can_be_repaired(model: nn.Module, symmetry: Symmetry, data: Iterable[Any]) -> bool:
    """Whether the form "repair" finds batch norms, or layers that make free units, in a network; it runs one batch."""
    ours = copy_model(model)
    return bool(batch_norms(ours) or find_layers(ours, symmetry.bind(ours), data)[0])


def find_layers(model: nn.Module, symmetry: Symmetry, data: Iterable[Any]) -> tuple[dict[str, int], dict[str, str]]:
    """The layers to repair with the axis of their units (from the right), and those that cannot be, with the reason."""
    layers = {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear | Convolution) and _makes_units(p, symmetry)}
    num_calls, normalised = _observe_calls(model, layers, data)
    axes: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for path in dict.fromkeys([*num_calls, *layers]):
        layer = layers[path]
        if path in normalised:
            continue
        why = _find_obstacle(path, layer, symmetry)
        if num_calls.get(path) != 1:
            why = why or f"it is called {num_calls.get(path, 0)} times in one pass"
        if why:
            skipped[path] = why
        else:
            axes[path] = -1 - (len(layer.kernel_size) if isinstance(layer, Convolution) else 0)
    return axes, skipped


def _find_filters(model: nn.Module, symmetry: Symmetry) -> tuple[list[str], dict[str, str]]:
    """The layers that make free units along the first axis of their weight, and those that make them otherwise."""
    found, skipped = [], {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Convolution) and _makes_units(path, symmetry):
            why = _find_obstacle(path, module, symmetry, needs_bias=False)
            if why is None:
                found.append(path)
            else:
                skipped[path] = why
    if not found:
        reasons = "; ".join(f"{path}: {why}" for path, why in skipped.items())
        raise ValueError(f"there is no layer to repair ({reasons or 'no linear or convolutional layer makes free units'})")
    return found, skipped


def _makes_units(path: str, symmetry: Symmetry) -> bool:
    """Whether a layer makes free units: the axis of its bias, or the first of its weight, has some."""
    weight, bias = symmetry.layouts.get(f"{path}.weight", ()), symmetry.layouts.get(f"{path}.bias")
    return bool(names(weight[:1] if bias is None else bias) & symmetry.groups.keys())


def _find_obstacle(path: str, layer: nn.Module, symmetry: Symmetry, needs_bias: bool = True) -> str | None:
    weight, bias = symmetry.layouts.get(f"{path}.weight"), symmetry.layouts.get(f"{path}.bias")
    tied = [keys for keys in symmetry.ties if {f"{path}.weight", f"{path}.bias"} & set(keys)]
    if weight is None:
        return "its weight is computed from other tensors"
    if bias is None and needs_bias:
        return "it has no bias to take the shift"
    if type(layer).forward not in _PLAIN or (bias is not None and bias != weight[:1]):
        return "its units are not the first axis of its weight"
    if tied:
        return f"it shares {tied[0][0]!r} with {tied[0][1]!r}"
    return None


def _observe_calls(
    model: nn.Module, layers: Mapping[str, nn.Module], data: Iterable[Any]
) -> tuple[dict[str, int], set[str]]:
    """On one batch: how often each layer is called, in that order, and which outputs go straight into a batch norm."""
    num_calls: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    normalised: set[str] = set()

    def count(path: str, output: Any) -> None:
        num_calls[path] = num_calls.get(path, 0) + 1
        outputs[path] = output

    def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
        normalised.update(path for path, output in outputs.items() if args and _holds_same(args[0], output))

    with contextlib.ExitStack() as handles:
        for norm in batch_norms(model).values():
            handles.enter_context(norm.register_forward_pre_hook(look))
        _hook(handles, layers, count)
        run_batches(model, [batch for batch, _ in zip(data, range(1), strict=False)])
    return num_calls, normalised


def _holds_same(value: Any, output: Any) -> bool:
    """Whether a tensor is an output, or all of it in another shape; the output is still there, so its memory is its own."""
    if not (isinstance(value, Tensor) and isinstance(output, Tensor)):
        return False
    return value.data_ptr() == output.data_ptr() and value.numel() == output.numel()


def _hook(handles: contextlib.ExitStack, layers: Mapping[str, nn.Module], see: Callable[[str, Any], Any]) -> None:
    for path, layer in layers.items():
        handles.enter_context(layer.register_forward_hook(lambda _module, _args, output, path=path: see(path, output)))


def measure_units(
    model: nn.Module,
    axes: Mapping[str, int],
    data: Iterable[Any],
    goals: Mapping[str, Statistics] | None = None,
    last: str | None = None,
    shifts: bool = True,
) -> dict[str, Statistics]:
    """Statistics of the layers' outputs; with goals, each batch is corrected by its own before it goes on.

    Nothing behind the layer `last` is run. Without `shifts` a correction is a factor alone.
    """
    moments = {path: Moments() for path in axes}

    def see(path: str, output: Tensor) -> Tensor | None:
        units = output.movedim(axes[path], -1)
        batch = moments[path].add(units.reshape(-1, units.shape[-1]))
        if path == last:
            raise StopForward
        if goals is None:
            return None
        scale, shift = _correction(batch, goals[path], shifts)
        return (units * scale + shift).to(output.dtype).movedim(-1, axes[path])

    with contextlib.ExitStack() as handles:
        _hook(handles, {path: model.get_submodule(path) for path in axes}, see)
        run_batches(model, data)
    found = {path: m.result() for path, m in moments.items()}
    for path, statistics in found.items():
        if not all(s.isfinite().all() for s in statistics):
            raise ValueError(f"the outputs of {path!r} are not finite on this data")
    return found


def _average(statistics: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    means, stds = (torch.stack(s) for s in zip(*statistics, strict=True))
    weight = torch.tensor(weights, dtype=torch.float64, device=means.device)
    return Statistics(weight @ means, weight @ stds)


def _measure_mixed_units(
    model: nn.Module, states: Sequence[State], weights: Sequence[float], axes: Mapping[str, int], data: Iterable[Any]
) -> dict[str, Statistics]:
    """The statistics of sum_i w_i x_i, where x_i are the activations of a unit in each endpoint."""
    endpoints = [copy_model(model) for _ in states]
    for endpoint, state in zip(endpoints, states, strict=True):
        endpoint.load_state_dict(state.load())
    moments = {path: Moments() for path in axes}
    for batch in data:
        mixed: dict[str, Tensor] = {}
        for endpoint, weight in zip(endpoints, weights, strict=True):

            def see(path: str, output: Tensor, weight: float = weight, mixed: dict[str, Tensor] = mixed) -> None:
                mixed[path] = weight * output.double() + mixed.get(path, 0.0)

            with contextlib.ExitStack() as handles:
                _hook(handles, {path: endpoint.get_submodule(path) for path in axes}, see)
                run_batches(endpoint, [batch])
        for path, output in mixed.items():
            units = output.movedim(axes[path], -1)
            moments[path].add(units.reshape(-1, units.shape[-1]))
    return {path: m.result() for path, m in moments.items()}


def _correction(now: Statistics, goal: Statistics, shifts: bool) -> tuple[Tensor, Tensor]:
    """The scale and shift that bring units to their goal; a unit that is constant on the data is only shifted."""
    constant = now.std <= 1e-6 * (now.mean.abs() + goal.std)
    scale = torch.where(constant, 1.0, goal.std / now.std.where(~constant, 1.0))
    return scale, goal.mean - scale * now.mean if shifts else torch.zeros_like(scale)


class _Corrections:
    """The scale and shift of each unit of a mixed network, and the network they are folded into.

    Corrections are composed here and folded into the first weights, so that narrow types are rounded once.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: Mapping[str, BatchNorm],
        axes: Mapping[str, int],
        goals: Mapping[str, Statistics],
        data: Iterable[Any],
        shifts: bool,
    ):
        self.model, self.norms, self.axes, self.goals, self.data, self.shifts = model, norms, axes, goals, data, shifts
        self.layers: dict[str, Any] = {path: model.get_submodule(path) for path in axes}
        self.first = {
            path: tuple(p.detach().to(torch.float64, copy=True) for p in (m.weight, m.bias))
            for path, m in self.layers.items()
        }
        self.total = {path: (torch.ones_like(bias), torch.zeros_like(bias)) for path, (_, bias) in self.first.items()}

    def find(self, tolerance: float) -> float:
        """Correct all layers in one pass and, if they miss their goals, one after the other; returns the mismatch left."""
        self.fold(self._measure(self.axes, goals=self.goals, shifts=self.shifts))
        mismatch = self._compare(self._measure(self.axes)) if self.axes else 0.0
        if mismatch > tolerance:
            for path, axis in self.axes.items():
                self.fold(self._measure({path: axis}, last=path))
            mismatch = self._compare(self._measure(self.axes))
        return mismatch

    def fold(self, found: Mapping[str, Statistics]) -> None:
        """Correct layers whose units have these statistics now."""
        for path, statistics in found.items():
            scale, shift = _correction(statistics, self.goals[path], self.shifts)
            scale, shift = self.total[path] = scale * self.total[path][0], scale * self.total[path][1] + shift
            weight, bias = self.first[path]
            with torch.no_grad():
                self.layers[path].weight.copy_(weight * scale.view(-1, *[1] * (weight.dim() - 1)))
                self.layers[path].bias.copy_(bias * scale + shift)

    def _measure(self, axes: Mapping[str, int], **options: Any) -> dict[str, Statistics]:
        with estimating(self.norms.values()):
            return measure_units(self.model, axes, self.data, **options)

    def _compare(self, found: Mapping[str, Statistics]) -> float:
        """The largest difference to the goals, relative to the typical standard deviation of the layer."""
        largest = 0.0
        for path, goal in self.goals.items():
            typical = goal.std.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
            differences = [(found[path].std - goal.std).abs().max()]
            if self.shifts:
                differences.append((found[path].mean - goal.mean).abs().max())
            largest = max(largest, float(max(differences) / typical))
        return largest
