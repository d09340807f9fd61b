"""Half way between a network and a soft permutation of it, a residual away: the point whose cost re-basin minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from onebasin.gather import mix
from onebasin.layout import Factor, names
from onebasin.network import RebasinNet
from onebasin.permutation import Permutation
from onebasin.structure import Symmetry


class HalfWay:
    """(theta + pi_P(theta)) / 2 + delta, as a function of the logits of P and of delta.

    A small network is over in a few dozen kernels, so what is done to its parameters at each step must not take hundreds:
    vectors of one group are permuted together, sums are taken of all tensors at once, and one gradient serves P and delta.

    Args:
        model: theta; copied.
        symmetry: its groups are those that move.
        net: the plans; None if nothing moves.
        residual: whether there is a delta, which starts normal with a deviation of 1e-4.
        generator: for that.
    """

    def __init__(
        self, model: nn.Module, symmetry: Symmetry, net: RebasinNet | None, residual: bool, generator: torch.Generator
    ):
        self.theta = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.symmetry, self.net = symmetry, net
        self.delta: dict[str, nn.Parameter] = {}
        if residual:
            for name, value in self.theta.items():
                noise = torch.randn(value.shape, generator=generator)
                self.delta[name] = nn.Parameter((1e-4 * noise).to(value))
        moving = set() if net is None else symmetry.groups.keys()
        self._moving = [name for name in self.theta if names(symmetry.layouts[name]) & moving]
        self._half = {name: value / 2 if name in self._moving else value for name, value in self.theta.items()}
        # Vectors by their group: (vectors, units).
        self._vectors: dict[str, list[str]] = {}
        for name in self._moving:
            group = _vector_group(symmetry, name)
            if group is not None:
                self._vectors.setdefault(group, []).append(name)
        self._stacks = {g: torch.stack([self._half[n] for n in members]) for g, members in self._vectors.items()}

    def backward(self, cost: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """Add the gradient of a cost of the point to the logits', and set it as delta's."""
        moved = self.move()
        point = self.place(moved)
        cost(point).backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in point.items()}
        if moved:
            torch.autograd.backward(list(moved.values()), [gradients[name] for name in moved])
        for name, value in self.delta.items():
            value.grad = gradients[name]

    def move(self) -> dict[str, Tensor]:
        """pi_P(theta) / 2 for the tensors that move, differentiable in the logits."""
        if self.net is None:
            return {}
        plans = self.net.plans(check=False)
        moved = {}
        for group, members in self._vectors.items():
            rows = (self._stacks[group] @ plans[group].T.to(self._stacks[group].dtype)).unbind()
            moved |= dict(zip(members, rows, strict=True))
        for name in self._moving:
            if name not in moved:
                moved[name] = mix(self._half[name], self.symmetry.layouts[name], plans, self.symmetry.parents)
        return moved

    def place(self, moved: dict[str, Tensor]) -> dict[str, Tensor]:
        """The point, as leaves that collect a gradient."""
        with torch.no_grad():
            point = _add(_add(self._half, self.delta), moved)
        return {name: value.detach().requires_grad_() for name, value in point.items()}

    def fuse(self, permutation: Permutation | None, weight: float) -> dict[str, Tensor]:
        """The fused network, weight theta + (1 - weight) pi(theta) + delta, with a hard permutation."""
        result = {}
        with torch.no_grad():
            for name, value in self.theta.items():
                if permutation is not None:
                    value = torch.lerp(permutation.move(value, self.symmetry.layouts[name]), value, weight)
                result[name] = value + self.delta[name] if name in self.delta else value
        return result

    def residual_length(self) -> float:
        """|delta|."""
        squares = [value.detach().square().sum() for value in self.delta.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _add(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of tensors of the same name, all at once; a tensor that the others do not have stays as it is."""
    if not others:
        return dict(tensors)
    sums = torch._foreach_add([tensors[name] for name in others], list(others.values()))  # pyright: ignore
    return {**tensors, **dict(zip(others, sums, strict=True))}


def _vector_group(symmetry: Symmetry, name: str) -> str | None:
    """The group of a tensor that is nothing but one vector of a group's units."""
    layout = symmetry.layouts[name]
    if len(layout) != 1 or not isinstance(layout[0], Factor):
        return None
    group = symmetry.groups.get(layout[0].name or "")
    return group.name if group is not None and not group.parents else None
