"""What to minimise: a cost of softly permuted parameters, given those of the target.

An objective is any callable ``(params, target, batch) -> scalar``. The ones here also have ``bind(model)``, which gives them
what they need to know of the architecture; `align` calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebasin.relaxation.distance import SoftDistance
from onebasin.symmetries.structure import Symmetry
from onebasin.tensors.lazy import LazyState
from onebasin.torch_internals import BatchNorm

Params = Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]


def parameter_keys(model: nn.Module | Params) -> list[str]:
    """The keys a cost counts: parameters, each tied tensor once; of a state dict, floating tensors but norm statistics."""
    if isinstance(model, nn.Module):
        return [key for key, value in model.named_parameters() if value.is_floating_point()]
    seen: set[int] = set()
    keys = []
    for key, value in (model.shapes if isinstance(model, LazyState) else model).items():
        statistic = key.rpartition(".")[2] in ("running_mean", "running_var")
        if isinstance(value, Tensor) and value.is_floating_point() and not statistic and id(value) not in seen:
            seen.add(id(value))
            keys.append(key)
    return keys


@dataclass(frozen=True)
class WeightDistance:
    """How far the parameters are apart; needs no data (eq. rebasinl2 of the paper).

    Attributes:
        kind: "l2", the sum of squared differences; "l1"; "inner", minus the inner product, which orders hard permutations as
            "l2" does but does not reward a blurred plan; "cosine", one minus the cosine of the angle.
        keys: the tensors that count; all parameters if None.
    """

    kind: Literal["l2", "l1", "inner", "cosine"] = "l2"
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "l1", "inner", "cosine"):
            raise ValueError(f"kind must be 'l2', 'l1', 'inner' or 'cosine', got {self.kind!r}")

    can_be_captured = True

    @property
    def floor(self) -> float:
        """No permutation costs less: one that costs this is found."""
        return 0.0 if self.kind in ("l2", "l1") else -float("inf")

    def bind(self, model: nn.Module | Params) -> WeightDistance:
        """Count the parameters of this model, each tied tensor once."""
        return self if self.keys is not None else replace(self, keys=tuple(parameter_keys(model)))

    def of_plans(self, source: Params, target: Params, symmetry: Symmetry) -> SoftDistance | None:
        """The same as a function of the plans that move `source`, for which the source is never moved as a whole.

        None where that cannot be: the cosine is no sum over tensors, and what a subclass computes is not known here.
        """
        if self.kind == "cosine" or type(self) is not WeightDistance:
            return None
        keys = parameter_keys(target) if self.keys is None else self.keys
        return SoftDistance(self.kind, source, target, keys, symmetry)

    def __call__(self, params: Params, target: Params, batch: Any = None) -> Tensor:
        """The distance; `batch` is not used."""
        keys = parameter_keys(target) if self.keys is None else self.keys
        pairs = ((params[key], target[key]) for key in keys)  # a pair at a time: they may come from disk
        if self.kind == "l2":
            return _total(functional.mse_loss(a, b, reduction="sum") for a, b in pairs)
        if self.kind == "l1":
            return _total((a - b).abs().sum() for a, b in pairs)
        if self.kind == "inner":
            return -_total((a * b).sum() for a, b in pairs)
        sums = torch.stack([torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]) for a, b in pairs]).sum(0)
        return 1 - sums[0] / (sums[1].sqrt() * sums[2].sqrt())


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


@dataclass(frozen=True)
class _OnTheLine:
    """A loss of the network at points on the line between target and permuted parameters.

    Attributes:
        loss: ``loss(output, target)``.
        data: an iterable of (inputs, target) batches, read again and again; may be given to `align` instead.
        model: the architecture, in eval mode but for its batch norms, which use the statistics of the batch: those stored
            with either endpoint would be wrong in between.
    """

    loss: Loss
    data: Iterable[Any] | None = None
    model: nn.Module | None = None

    needs_data = True
    can_be_captured = True

    def bind(self, model: nn.Module | Params) -> Any:
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
        inputs, expected = batch
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        return self.loss(torch.func.functional_call(self.model, mixed, args, kwargs), expected)


def _between(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """(1 - weight) start + weight end, in the type of the end."""
    return torch.lerp(start.to(end.dtype), end, weight.to(end.dtype) if isinstance(weight, Tensor) else weight)


@dataclass(frozen=True)
class Midpoint(_OnTheLine):
    """The loss half way between the two networks (eq. mid of the paper)."""

    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The loss at one half."""
        return self.at(params, target, batch, 0.5)

    def points(self) -> Sequence[float]:
        """Where a hard permutation is judged."""
        return (0.5,)


@dataclass(frozen=True)
class RandomPoint(_OnTheLine):
    """The loss at a random point between the two networks, drawn anew at each step (eq. rand of the paper).

    Attributes:
        low: the smallest weight of the permuted network.
        high: the largest.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"0 <= low < high <= 1 is needed, got low={self.low}, high={self.high}")

    def __call__(self, params: Params, target: Params, batch: Any) -> Tensor:
        """The loss at a random weight, from the global generator of the parameters' device."""
        floating = next(v for v in params.values() if isinstance(v, Tensor) and v.is_floating_point())
        share = torch.rand((), device=floating.device)  # never read back: a graph that holds this step draws anew
        return self.at(params, target, batch, self.low + (self.high - self.low) * share)

    def points(self) -> Sequence[float]:
        """Where a hard permutation is judged: evenly, so that two of them can be compared."""
        return tuple(self.low + (self.high - self.low) * share for share in (0.25, 0.5, 0.75))
