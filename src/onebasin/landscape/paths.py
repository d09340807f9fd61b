"""The loss between models: on the line through two of them, on the plane through three."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import torch
from torch import nn

from onebasin.landscape.batch_norm import reset_statistics
from onebasin.landscape.batches import check_data, copy_model
from onebasin.landscape.calibration import RepairForm, check_form, repair_in_place
from onebasin.plots import plot_path, plot_plane
from onebasin.plots.tables import html_table
from onebasin.symmetries import Symmetry
from onebasin.tensors.interpolation import interpolate, read_alike
from onebasin.tensors.progress import Progress, show_progress
from onebasin.tensors.states import Model, State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Evaluate = Callable[[nn.Module], SupportsFloat | Mapping[str, SupportsFloat]]
"""From a model to its loss, or to a dict of metrics with the key "loss"."""

Prepare = Callable[[nn.Module, Sequence[float]], None]
"""Called with a mixed model of ours, to change, and the weights of the mix."""


@dataclass(frozen=True)
class LinearPath:
    """The loss at points (1 - w) A + w B of the line between two models.

    Attributes:
        weights: w for each point, from 0 (model A) to 1 (model B).
        metrics: for each metric, its value at each point; "loss" is always there. NaN stays NaN.

    >>> import onebasin as ob
    >>> path = ob.LinearPath([0.0, 0.5, 1.0], {"loss": [0.25, 1.25, 0.75], "accuracy": [0.9, 0.6, 0.8]})
    >>> path.barrier, path.auc
    (0.75, 0.375)
    """

    weights: list[float]
    metrics: dict[str, list[float]]

    @property
    def losses(self) -> list[float]:
        """The loss at each point."""
        return self.metrics["loss"]

    @property
    def excess(self) -> list[float]:
        """How far the loss at each point is above the straight line between the losses of the two ends."""
        first, last = self.losses[0], self.losses[-1]
        return [loss - ((1 - w) * first + w * last) for w, loss in zip(self.weights, self.losses, strict=True)]

    @property
    def barrier(self) -> float:
        """The largest excess; the paper's supremum over 0 < w < 1, which is never below the 0 it tends to at the ends.

        NaN if the loss is NaN anywhere.
        """
        return float(np.max(self.excess))

    @property
    def auc(self) -> float:
        """The area under the excess, by the trapezoidal rule; negative where the loss sinks below the straight line."""
        excess, weights = np.array(self.excess), np.array(self.weights)
        return float(((excess[1:] + excess[:-1]) / 2 * np.diff(weights)).sum())

    def __repr__(self) -> str:
        return f"LinearPath({len(self.weights)} points, barrier {self.barrier:.4g}, AUC {self.auc:.4g})"

    def _repr_html_(self) -> str:
        middle = min(range(len(self.weights)), key=lambda i: abs(self.weights[i] - 0.5))
        numbers = {"barrier": self.barrier, "AUC": self.auc}
        for name, values in self.metrics.items():
            numbers |= {f"{name} at A": values[0], f"{name} at the midpoint": values[middle], f"{name} at B": values[-1]}
        return html_table([(name, f"{value:.4g}") for name, value in numbers.items()])

    def plot(self, ax: Axes | None = None, label: str | None = None) -> Axes:
        """Draw the loss along the line. Needs ``onebasin[plots]``."""
        return plot_path(self, ax=ax, label=label)


def linear_path(
    model_a: nn.Module,
    model_b: Model,
    evaluate: Evaluate,
    num_points: int = 25,
    data: Iterable[Any] | None = None,
    progress: bool | Progress = False,
    repair: RepairForm | None = None,
    symmetry: Symmetry | None = None,
) -> LinearPath:
    """Evaluate models at equal steps on the line from `model_a` to `model_b`.

    The points are evaluated on one copy of `model_a`, in eval mode and without gradients; the models are not touched.

    Args:
        model_a: a module.
        model_b: a module of the same architecture, or its state dict.
        evaluate: from a model to its loss, or to a dict of metrics with the key "loss".
        num_points: how many, both ends included; an odd number has the midpoint.
        data: batches, each inputs or a pair (inputs, target); with it the statistics of batch norms are estimated anew at
            every point, both ends included.
        progress: show the points as they are done; or a function to call with what is done, how far, and how much there is.
        repair: correct the statistics of hidden units at every point between the ends, in this form; see `repair`.
        symmetry: of the models; needed by `repair`.

    Raises:
        ValueError: if the models differ in keys or shapes, or `evaluate` returns no loss.
        TypeError: if a metric is not a number.

    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _, _ = a.weight.data.fill_(-1), b.weight.data.fill_(1)
    >>> ob.linear_path(a, b, lambda model: (1 - model.weight**2).item(), num_points=5)
    LinearPath(5 points, barrier 1, AUC 0.625)
    """
    if num_points < 2:
        raise ValueError(f"num_points must be at least 2, for the two ends; got {num_points}")
    if repair is not None:
        check_form("repair", repair)
        if symmetry is None:
            raise ValueError("repair needs to know which layers make hidden units: give the symmetry of the models")
    states = read_alike([model_a, model_b])
    lambdas = [float(w) for w in np.linspace(0, 1, num_points)]
    mixes = [(1 - w, w) for w in lambdas]
    prepare = _reset_with(data) if symmetry is None or repair is None else _repair_with(repair, states, data, symmetry)
    return LinearPath(lambdas, _evaluate_mixes(model_a, states, mixes, evaluate, prepare, progress))


@dataclass(frozen=True)
class Plane:
    """The loss on the plane through three models, at points A + x u + y v, with u and v of length one.

    Attributes:
        x: coordinates of the columns, towards model B. A unit is a unit of distance between parameters.
        y: coordinates of the rows.
        points: the coordinates of the three models.
        metrics: for each metric a grid, a row for each y; "loss" is always there. NaN stays NaN.

    >>> import onebasin as ob
    >>> corners = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    >>> plane = ob.Plane([0.0, 1.0], [0.0, 1.0], corners, {"loss": [[0.1, 0.2], [0.3, 0.9]]})
    >>> plane.losses[1][0]  # at model C
    0.3
    """

    x: list[float]
    y: list[float]
    points: tuple[tuple[float, float], ...]
    metrics: dict[str, list[list[float]]]

    @property
    def losses(self) -> list[list[float]]:
        """The grid of losses, a row for each y."""
        return self.metrics["loss"]

    def __repr__(self) -> str:
        low, high = self._range
        return f"Plane({len(self.x)} x {len(self.y)} points, loss from {low:.4g} to {high:.4g})"

    def _repr_html_(self) -> str:
        low, high = self._range
        models = {f"model {name}": f"({x:.4g}, {y:.4g})" for name, (x, y) in zip("ABC", self.points, strict=True)}
        rows = {"points": f"{len(self.x)} x {len(self.y)}", "loss": f"{low:.4g} to {high:.4g}", **models}
        return html_table(list(rows.items()))

    @property
    def _range(self) -> tuple[float, float]:
        """The smallest and the largest loss that is a number; NaN if none is."""
        known = [loss for row in self.losses for loss in row if not math.isnan(loss)]
        return min(known, default=math.nan), max(known, default=math.nan)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the contours of the loss, with the three models. Needs ``onebasin[plots]``."""
        return plot_plane(self, ax=ax)


def loss_plane(
    model_a: nn.Module,
    model_b: Model,
    model_c: Model,
    evaluate: Evaluate,
    resolution: int = 21,
    margin: float = 0.2,
    data: Iterable[Any] | None = None,
    progress: bool | Progress = False,
) -> Plane:
    """Evaluate models on a grid of the plane through three models (Garipov et al. 2018, arXiv 1802.10026).

    The basis is u = B - A and v = (C - A) - <C - A, u> u / <u, u>, both scaled to length one; lengths and angles are of
    parameters alone. Evaluation is as in `linear_path`. Outside the triangle of the models the variances of batch norms are
    extrapolated and may turn negative, which gives NaN: give `data` to estimate them anew.

    Args:
        model_a: a module; the origin.
        model_b: a module of the same architecture, or its state dict; on the x axis.
        model_c: likewise, above it.
        evaluate: from a model to its loss, or to a dict of metrics with the key "loss".
        resolution: points along each side; their square is the number of evaluations.
        margin: how far the grid reaches beyond the models, relative to their extent.
        data: batches for the statistics of batch norms.
        progress: show the points as they are done; or a function to call with what is done, how far, and how much there is.

    Raises:
        ValueError: if the three lie on one line, or as in `linear_path`.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b, c = (nn.Linear(2, 1) for _ in range(3))
    >>> plane = ob.loss_plane(a, b, c, lambda model: model.weight.square().sum().item(), resolution=5)
    >>> len(plane.losses), len(plane.losses[0])
    (5, 5)
    """
    if resolution < 2:
        raise ValueError(f"resolution must be at least 2, got {resolution}")
    if not 0 <= margin < float("inf"):
        raise ValueError(f"margin must be a finite number and not negative, got {margin}")
    states = read_alike([model_a, model_b, model_c])
    length, height, foot = _measure_triangle(states, [name for name, _ in model_a.named_parameters()])
    points = ((0.0, 0.0), (length, 0.0), (foot, height))
    x, y = (_span([p[i] for p in points], resolution, margin) for i in range(2))
    mixes = []
    for top in y:
        for right in x:
            c = top / height
            b = (right - c * foot) / length
            mixes.append((1 - b - c, b, c))
    flat = _evaluate_mixes(model_a, states, mixes, evaluate, _reset_with(data), progress)
    metrics = {name: [row[i : i + len(x)] for i in range(0, len(row), len(x))] for name, row in flat.items()}
    return Plane(x, y, points, metrics)


def _measure_triangle(states: Sequence[State], parameters: Sequence[str]) -> tuple[float, float, float]:
    """The length of AB, the height of C above it, and how far along AB the foot of that height lies."""
    gram = np.zeros((2, 2))
    rounding = 0.0
    for key in parameters:
        a, *others = (state[key].to(states[0][key].device, torch.float64).flatten() for state in states)
        if not states[0][key].is_floating_point():
            continue
        sides = torch.stack([other - a for other in others])
        gram += (sides @ sides.T).cpu().numpy()
        eps = max(torch.finfo(state[key].dtype).eps for state in states)
        rounding += eps**2 * max(float(t @ t) for t in (a, *others))
    length, side = np.sqrt(np.diag(gram))
    # Models that were rounded to their dtype are never exactly on a line.
    slack = max(1e-6 * max(length, side), rounding**0.5)
    if not length > slack:
        raise ValueError("the first two models are equal: three models that lie on one line span no plane")
    foot = gram[0, 1] / length
    height = max(gram[1, 1] - foot**2, 0.0) ** 0.5
    if not height > slack:
        raise ValueError(f"the three models lie on one line (distance of the third to it: {height:.2g}): they span no plane")
    return float(length), float(height), float(foot)


def _span(values: Sequence[float], num: int, margin: float) -> list[float]:
    low, high = min(values), max(values)
    reach = margin * (high - low)
    return [float(v) for v in np.linspace(low - reach, high + reach, num)]


def _evaluate_mixes(
    model: nn.Module,
    states: Sequence[State],
    mixes: Sequence[Sequence[float]],
    evaluate: Evaluate,
    prepare: Prepare,
    progress: bool | Progress,
) -> dict[str, list[float]]:
    """The metrics of weighted sums of states, each loaded into one copy of the model and prepared."""
    ours = copy_model(model)
    metrics: dict[str, list[float]] = {}
    with show_progress(progress) as report:
        for number, mix in enumerate(mixes):
            ours.load_state_dict(interpolate(states, mix).load())
            ours.eval()  # again for every point: evaluate may have changed the mode
            prepare(ours, mix)
            with torch.no_grad():
                point = read_metrics(evaluate(ours))
            if metrics and point.keys() != metrics.keys():
                raise ValueError(f"evaluate returned the metrics {list(metrics)} at one point, {list(point)} at another")
            for name, value in point.items():
                metrics.setdefault(name, []).append(value)
            report("points", number + 1, len(mixes))
    return metrics


def _repair_with(form: RepairForm, states: Sequence[State], data: Iterable[Any] | None, symmetry: Symmetry) -> Prepare:
    """Repairs mixes of the states; the states themselves need none."""

    def prepare(model: nn.Module, mix: Sequence[float]) -> None:
        if max(mix) < 1:
            repair_in_place(model, states, data, symmetry, mix, form=form, tolerance=float("inf"))

    return prepare


def _reset_with(data: Iterable[Any] | None) -> Prepare:
    """Estimates the statistics of batch norms anew on this data, if there is any."""
    if data is None:
        return lambda model, mix: None
    checked = check_data(data)
    return lambda model, mix: reset_statistics(model, checked)


def read_metrics(result: Any) -> dict[str, float]:
    """What a function of the user returned for a model, as numbers by name; "loss" is always there.

    Raises:
        ValueError: if there is no loss.
        TypeError: if something is no number.
    """
    named = dict(result) if isinstance(result, Mapping) else {"loss": result}
    if "loss" not in named:
        raise ValueError(f"evaluate must return a loss, or a dict with the key 'loss'; its dict has {list(named)}")
    numbers = {}
    for name, value in named.items():
        try:
            if isinstance(value, str):
                raise TypeError
            numbers[str(name)] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"evaluate must return numbers; {name!r} is {_describe(value)}") from None
    return numbers


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
