"""What to minimise: a cost of softly permuted parameters, given those of the target."""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from onebasin.landscape.batches import call_model, split_batch
from onebasin.relaxation.distance import Kind, SoftDistance, measure
from onebasin.symmetries import Symmetry
from onebasin.tensors.states import Model, read_state
from onebasin.tensors.sums import add_up, inner, sum_pieces
from onebasin.torch_internals import BatchNorm

Params = Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]
Function = Callable[[dict[str, Tensor], dict[str, Tensor], Any], Tensor]
"""A cost of the permuted parameters beside those of the target, and a batch of the data."""


class Objective(ABC):
    """A cost of the permuted parameters beside those of the target; smaller is better.

    Subclass it to tell `align` more about a cost of your own than a plain function can.

    Attributes:
        uses_data: whether a call looks at its batch. If not, data is not read for it.
        needs_data: whether it cannot do without.
        needs_target: whether every batch must have a target.
        can_be_captured: whether a call does the same operations each time and never waits for the device, so that a CUDA
            graph can hold it.
        data: batches that were given with the objective, if any.
        repaired: whether it is to see networks whose statistics are corrected, see `Midpoint`; None if that is left open.
        floor: no permutation costs less: one that costs this is the best there is.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> class FirstLayer(ob.Objective):
    ...     def __call__(self, params, target, batch=None):
    ...         return (params["0.weight"] - target["0.weight"]).square().sum()
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), objective=FirstLayer(), steps=20)
    >>> result.cost <= result.start_cost
    True
    """

    uses_data: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False
    can_be_captured: ClassVar[bool] = False
    data: Iterable[Any] | None = None
    repaired: bool | None = False
    floor: float = -math.inf

    @abstractmethod
    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The cost as a scalar, differentiable in `params`; `batch` is None without data."""

    def bind(self, model: Model) -> Objective:
        """The same objective for models of this architecture."""
        return self

    def judge(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The cost of hard parameters, by which permutations are compared; nothing about it is random."""
        return self(params, target, batch)

    def of_plans(self, source: Params, target: Params, symmetry: Symmetry) -> SoftDistance | None:
        """The cost as a function of plans, if it can be computed without building the permuted network; else None."""
        return None


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """A plain function ``(params, target, batch) -> scalar`` as an objective."""

    function: Function

    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """What the function returns."""
        return self.function(dict(params), dict(target), batch)


def as_objective(objective: Objective | Function | None) -> Objective:
    """An objective from what a user may give: one of ours, a plain function, or nothing, which means `WeightDistance`.

    Raises:
        TypeError: for anything else.
    """
    if objective is None:
        return WeightDistance()
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, type) or not callable(objective):
        raise TypeError(
            "objective must be WeightDistance(), Midpoint(loss), RandomPoint(loss), or a function "
            f"(params, target, batch) -> scalar; got {objective!r}"
        )
    return FunctionObjective(objective)


def parameter_keys(model: Model) -> tuple[str, ...]:
    """The keys a cost counts: parameters, each tied tensor once; of a state, floating tensors but norm statistics."""
    if isinstance(model, nn.Module):
        return tuple(key for key, value in model.named_parameters() if value.is_floating_point())
    first: dict[int, str] = {}
    for key, value in read_state(model).shapes.items():
        if value.is_floating_point() and key.rpartition(".")[2] not in ("running_mean", "running_var"):
            first.setdefault(id(value), key)
    return tuple(first.values())


def each_tied_once(keys: Iterable[str], symmetry: Symmetry) -> tuple[str, ...]:
    """The keys, without those that are tied to one before them in `Symmetry.ties`."""
    kept = dict.fromkeys(keys)
    repeated = {key for tied in symmetry.ties for key in [k for k in tied if k in kept][1:]}
    return tuple(key for key in kept if key not in repeated)


@dataclass(frozen=True)
class WeightDistance(Objective):
    """How far the parameters are apart; needs no data (eq. 7 of the paper).

    Attributes:
        kind: "l2", the sum of squared differences; "l1"; "inner", minus the inner product, which orders hard permutations as
            "l2" does but does not reward a blurred plan; "cosine", one minus the cosine of the angle.
        keys: the tensors that count; all parameters if None.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> result = ob.align(b, to=a, example_inputs=torch.zeros(1, 4), objective=ob.WeightDistance("l1"), steps=20)
    >>> result.cost <= result.start_cost
    True
    """

    kind: Kind | Literal["cosine"] = "l2"
    keys: tuple[str, ...] | None = None

    uses_data: ClassVar[bool] = False
    can_be_captured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "l1", "inner", "cosine"):
            raise ValueError(f"kind must be 'l2', 'l1', 'inner' or 'cosine', got {self.kind!r}")

    @property
    def floor(self) -> float:  # type: ignore[override]
        """Zero for distances that equal parameters reach."""
        return 0.0 if self.kind in ("l2", "l1") else -math.inf

    def bind(self, model: Model) -> WeightDistance:
        """Count the parameters of this model, each tied tensor once."""
        return self if self.keys is not None else replace(self, keys=parameter_keys(model))

    def of_plans(self, source: Params, target: Params, symmetry: Symmetry) -> SoftDistance | None:
        """None for the cosine, which is no sum over tensors, and for subclasses, whose cost is not known here."""
        if self.kind == "cosine" or type(self) is not WeightDistance:
            return None
        return SoftDistance(self.kind, source, target, self.keys or parameter_keys(target), symmetry)

    def sums(self, value: Tensor, target: Tensor) -> tuple[float, ...]:
        """What one tensor contributes to a distance of lazy states, see `combine`."""
        value, target = value.to(target.device, target.dtype), target
        kind = self.kind
        if kind != "cosine":
            return (add_up(sum_pieces(functools.partial(measure, kind), value, target)),)
        pairs = ((value, target), (value, value), (target, target))
        return tuple(add_up(sum_pieces(inner, *pair)) for pair in pairs)

    def combine(self, sums: Sequence[tuple[float, ...]]) -> float:
        """The distance from what all tensors contribute, whoever computed it."""
        totals = [math.fsum(each) for each in zip(*sums, strict=True)]
        if self.kind != "cosine":
            return totals[0] if totals else 0.0
        return 1 - totals[0] / (math.sqrt(totals[1]) * math.sqrt(totals[2]))

    def __call__(self, params: Params, target: Params, batch: Any = None) -> Tensor:
        """The distance; `batch` is not used."""
        keys = self.keys or parameter_keys(target)
        pairs = ((params[key], target[key]) for key in keys)  # a pair at a time: they may come from disk
        kind = self.kind
        if kind != "cosine":
            return torch.stack([measure(kind, a, b) for a, b in pairs]).sum()
        sums = torch.stack([torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]) for a, b in pairs]).sum(0)
        return 1 - sums[0] / (sums[1].sqrt() * sums[2].sqrt())


@dataclass(frozen=True)
class _OnTheLine(Objective):
    """A loss of the network at points on the line between target and permuted parameters; see `Midpoint`."""

    loss: Loss
    data: Iterable[Any] | None = None
    repaired: bool | None = None
    model: nn.Module | None = None

    needs_data: ClassVar[bool] = True
    needs_target: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(f"loss must be a function loss(output, target) -> scalar, got {self.loss!r}")
        if self.repaired is not None and not isinstance(self.repaired, bool):
            raise TypeError(f"repaired must be True or False, or None to leave it open; got {self.repaired!r}")

    def bind(self, model: Model) -> Self:
        """Take a private copy of the architecture."""
        if self.model is not None:
            return self
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__} runs the network: give align modules, not state dicts")
        private = copy.deepcopy(model).eval()
        for module in private.modules():
            if isinstance(module, BatchNorm):
                module.train()
        return replace(self, model=private)

    def at(self, params: Params, target: Params, batch: Any, weight: float | Tensor) -> Tensor:
        """The loss at (1 - weight) target + weight params."""
        if self.model is None:
            raise ValueError(f"{type(self).__name__} does not know the network yet: call bind(model) first")
        mixed: dict[str, Any] = {}
        done: dict[int, Any] = {}
        for key, value in params.items():
            if id(value) not in done:
                floating = isinstance(value, Tensor) and value.is_floating_point()
                done[id(value)] = _between(target[key], value, weight) if floating else value
            mixed[key] = done[id(value)]
        inputs, expected = split_batch(batch, needs_target=True)
        return self.loss(call_model(self.model, inputs, mixed), expected)


def _between(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """(1 - weight) start + weight end, in the type of the end."""
    return torch.lerp(start.to(end.dtype), end, weight.to(end.dtype) if isinstance(weight, Tensor) else weight)


@dataclass(frozen=True)
class Midpoint(_OnTheLine):
    """The loss at the midpoint between the two networks (eq. 8 of the paper).

    Attributes:
        loss: ``loss(output, target)``.
        data: an iterable of (inputs, target) batches, read many times; may be given to `align` instead.
        repaired: whether the networks are evaluated with REPAIR at each point: a network without norms is replaced by its
            normalised twin (see `onebasin.landscape.normalised_twin`), so that the collapse of variance on the line, which
            `repair` undoes afterwards, does not decide. If None, where `merge` repairs what it made, and not in `align`.
            Batch norms use the statistics of the batch in any case.
        model: the architecture, in eval mode except for its batch norms, which use the statistics of the batch: those stored
            with either endpoint would be wrong in between. `align` sets it.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(4)]
    >>> loss = nn.functional.cross_entropy
    >>> result = ob.align(b, to=a, data=data, objective=ob.Midpoint(loss), method="sinkhorn", steps=10)
    >>> result.cost <= result.start_cost
    True
    """

    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The loss at one half."""
        return self.at(params, target, batch, 0.5)


@dataclass(frozen=True)
class RandomPoint(_OnTheLine):
    """The loss at a random point between the two networks, drawn again at each step (eq. 9 of the paper).

    It has the attributes of `Midpoint`, and two more.

    Attributes:
        low: the smallest weight of the permuted network.
        high: the largest.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> a, b = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    >>> data = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(4)]
    >>> loss = nn.functional.cross_entropy
    >>> objective = ob.RandomPoint(loss, low=0.3, high=0.7)
    >>> ob.align(b, to=a, data=data, objective=objective, method="sinkhorn", steps=10).method
    'sinkhorn'
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"0 <= low < high <= 1 is needed, got low={self.low}, high={self.high}")

    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The loss at a random weight, from the global generator of the parameters' device."""
        floating = next(v for v in params.values() if isinstance(v, Tensor) and v.is_floating_point())
        share = torch.rand((), device=floating.device)  # never read back: a graph that holds this step draws anew
        return self.at(params, target, batch, self.low + (self.high - self.low) * share)

    @property
    def points(self) -> tuple[float, ...]:
        """Where hard permutations are judged: at fixed points, so that two of them can be compared."""
        return tuple(self.low + (self.high - self.low) * share for share in (0.25, 0.5, 0.75))

    def judge(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The mean over the points."""
        return torch.stack([self.at(params, target, batch, point) for point in self.points]).mean()
