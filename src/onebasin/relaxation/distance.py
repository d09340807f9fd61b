# pyright: reportIncompatibleMethodOverride=false
"""The distance of softly permuted tensors from their targets, and its gradient in the plans, a tensor at a time.

A distance that is a sum over tensors needs no softly permuted network: each tensor is moved, compared and differentiated
before the next one. For W moved by two plans, P along its first axis and Q along its last, that is five products,

    X = W Q^T,   R = d cost / d (P X),   dP = R X^T,   dQ = (P^T R)^T W,

in memory that is used again for the next tensor. The first of two plans takes part in two of the five products, the last in
three: the larger one goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onebasin.symmetries import Symmetry
from onebasin.symmetries.layout import Factor, Layout, names
from onebasin.symmetries.mixing import Plans, is_joined, is_stacked, mix_all
from onebasin.symmetries.unrolling import unroll

Kind = Literal["l2", "l1", "inner"]
_Pair = tuple[Tensor, Tensor]  # a tensor to permute and its target


class SoftDistance:
    """A distance as a function of plans; which plan moves which axis is read from the layouts once.

    Args:
        kind: the "l2" distance squared, "l1", or "inner", minus the inner product.
        source: the tensors to permute.
        target: what they are to match, of the same shapes.
        keys: the tensors that count.
        symmetry: of the source; its groups have the plans.
    """

    def __init__(
        self, kind: Kind, source: Mapping[str, Any], target: Mapping[str, Any], keys: Sequence[str], symmetry: Symmetry
    ):
        self.keys = frozenset(keys)
        self._kind: Kind = kind
        self._symmetry = symmetry
        self._chains: list[_Chain] = []
        small: dict[str, _Pair] = {}
        self._portions = [small]  # differentiated by autograd: small tensors together, others one by one
        vectors: dict[str, list[_Pair]] = {}
        fixed = []
        for key in keys:
            pair = source[key].detach(), target[key].detach()
            layout = symmetry.layouts[key]
            if not names(layout) & symmetry.groups.keys():
                fixed.append(differentiate(kind, pair[0].clone(), pair[1])[0])
            elif is_joined(pair[0]) or is_stacked(pair[0]):
                small[key] = pair
            elif (group := _find_group(layout, symmetry)) is not None:
                vectors.setdefault(group, []).append(pair)
            elif pair[0].dim() == 1:
                small[key] = pair
            elif (chain := _find_chain(*pair, layout, symmetry)) is not None:
                self._chains.append(chain)
            else:
                self._portions.append({key: pair})
        for group, pairs in vectors.items():
            rows = [torch.stack(tensors) for tensors in zip(*pairs, strict=True)]
            self._chains.append(_Chain(rows[0], rows[1], ((group, -1),)))
        self._fixed = torch.stack(fixed).sum() if fixed else None

    @property
    def takes_any_alone(self) -> bool:
        """Whether some tensor is moved by itself. If none is, the softly permuted network is small and costs no more."""
        return bool(self._chains or self._portions[1:])

    def __call__(self, plans: Plans, gradients: Plans) -> Tensor:
        """The distance at these plans; what it adds to the gradient in each of them is added to `gradients`."""
        plans = {name: plan.detach() for name, plan in plans.items()}
        costs = [] if self._fixed is None else [self._fixed]
        costs += [self._differentiate(portion, plans, gradients) for portion in self._portions if portion]
        room = max((chain.room for chain in self._chains), default=0)
        if room:
            # One buffer for all tensors: to fault in fresh pages costs as much as a pass over them.
            memory = self._chains[0].source.new_empty(room)
            costs += [chain.differentiate(self._kind, plans, gradients, memory) for chain in self._chains]
        return torch.stack(costs).sum()

    def _differentiate(self, pairs: Mapping[str, _Pair], plans: Plans, gradients: Plans) -> Tensor:
        """The cost of some tensors by autograd: small ones, which share products, and those of nested groups."""
        layouts = self._symmetry.layouts
        used = sorted(names(tuple(term for key in pairs for term in layouts[key])) & plans.keys())
        live = {name: plans[name].detach().requires_grad_() for name in used}
        with torch.enable_grad():
            soft = mix_all({key: pair[0] for key, pair in pairs.items()}, layouts, live, self._symmetry.parents)
        costs, residuals = [], []
        for key, (_, target) in pairs.items():
            values = soft[key].detach().clone()
            costs.append(differentiate(self._kind, values, target)[0])
            residuals.append(values.mul_(_FACTORS[self._kind]))
        found = torch.autograd.grad([soft[key] for key in pairs], list(live.values()), residuals)
        for name, gradient in zip(live, found, strict=True):
            gradients[name].add_(gradient)
        return torch.stack(costs).sum()


@dataclass(frozen=True)
class _Chain:
    """A tensor that plain plans move along its first axis, its last, or both.

    Attributes:
        source: the tensor, its axes in an order in which that is so.
        target: what it is to match, likewise.
        moves: group and axis of each plan, in the order of the products.
    """

    source: Tensor
    target: Tensor
    moves: tuple[tuple[str, int], ...]

    @property
    def room(self) -> int:
        """Entries of the memory that `differentiate` needs: the moved tensor after each product, and the source in order."""
        return self.source.numel() * (len(self.moves) + (not self.source.is_contiguous()))

    def differentiate(self, kind: Kind, plans: Plans, gradients: Plans, memory: Tensor) -> Tensor:
        """The cost; its gradients are added to `gradients`."""
        pieces = [piece.view(self.source.shape) for piece in memory[: self.room].split(self.source.numel())]
        stages = [self.source if self.source.is_contiguous() else pieces.pop().copy_(self.source)]
        for name, axis in self.moves:
            torch.mm(plans[name], _units(stages[-1], axis), out=_units(pieces[-1], axis))
            stages.append(pieces.pop())
        residual = stages.pop()
        (cost, residual), factor = differentiate(kind, residual, self.target), _FACTORS[kind]
        for name, axis in reversed(self.moves):
            before = stages.pop()
            sum_so_far = gradients[name]
            torch.addmm(sum_so_far, _units(residual, axis), _units(before, axis).mT, alpha=factor, out=sum_so_far)
            if stages:  # there is a plan before this one; what it made is not needed any more
                torch.mm(plans[name].mT, _units(residual, axis), out=_units(before, axis))
                residual = before
        return cost


def _units(tensor: Tensor, axis: int) -> Tensor:
    """A view as a matrix: the units of the first (0) or last (-1) axis as rows, everything else as columns."""
    return tensor.flatten(1) if axis == 0 else tensor.flatten(0, -2).mT


def measure(kind: Kind, values: Tensor, target: Tensor) -> Tensor:
    """The distance of values from a target, differentiable in the values."""
    if torch.is_grad_enabled():
        return _Distance.apply(values, target, kind)[0]  # pyright: ignore
    return -(values * target).sum() if kind == "inner" else _add_up(kind, values - target)


class _Distance(torch.autograd.Function):
    """Cost and gradient as `differentiate` states them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, target: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        return differentiate(kind, values.clone(), target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Kind], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], inputs[0])
        ctx.kind = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        residual, values = ctx.saved_tensors
        if ctx.kind == "l2" and torch.is_grad_enabled():  # for a second derivative: the residual moves with the values
            residual = residual + (values - values.detach())
        return residual * (grad * _FACTORS[ctx.kind]), None, None


_FACTORS: dict[Kind, float] = {"l2": 2.0, "l1": 1.0, "inner": -1.0}


def differentiate(kind: Kind, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of values from a target, and its gradient up to the factor of its kind, in the memory of the values."""
    if kind == "inner":
        cost = -values.mul_(target).sum()
        return cost, values.copy_(target)
    cost = _add_up(kind, values.sub_(target))
    return cost, values.sign_() if kind == "l1" else values


def _add_up(kind: Kind, residual: Tensor) -> Tensor:
    """The sum of the squares or the magnitudes of all entries.

    Row by row: a norm is added up in one place, and over a million entries it would lose four digits.
    """
    rows = residual.flatten(1) if residual.dim() > 1 else residual
    if kind == "l1":
        return torch.linalg.vector_norm(rows, 1, dim=-1).sum()
    return torch.linalg.vector_norm(rows, dim=-1).square().sum()


def _find_group(layout: Layout, symmetry: Symmetry) -> str | None:
    """The group with one unit per entry of a vector; None for any other tensor."""
    match layout:
        case (Factor(_, str() as name),) if not symmetry.parents.get(name, ("",)):
            return name
    return None


def _find_chain(source: Tensor, target: Tensor, layout: Layout, symmetry: Symmetry) -> _Chain | None:
    """The chain of a tensor that one or two groups without parents move, each along one axis; None for any other tensor."""
    groups = symmetry.groups
    block, *others = unroll(layout, groups.keys(), source, target)
    moved = [axis for axis, name in enumerate(block.labels) if name in groups]
    moving = [block.labels[axis] or "" for axis in moved]
    if others or len(moved) > 2 or any(symmetry.parents[name] for name in moving):
        return None
    if len(moved) == 2:
        places = [0, -1]
    else:
        places = [0 if moved[0] < len(block.labels) - 1 else -1]
    source, target = (tensor.movedim(moved, places) for tensor in block.tensors)
    larger_first = sorted(zip(moving, places, strict=True), key=lambda move: -groups[move[0]].size)
    return _Chain(source, target, tuple(larger_first))
