"""Half way between a network and a soft permutation of it, a residual away: the point whose cost re-basin minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from onebasin.relaxation.mixing import mix_all
from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Permutation, Symmetry
from onebasin.symmetries.layout import names
from onebasin.torch_internals import add_all


class HalfWay:
    """(theta + pi_P(theta)) / 2 + delta, as a function of the logits of P and of delta.

    A small network is over in a few dozen kernels, so what is done to its parameters at each step must not take hundreds:
    tensors are permuted together where they are alike, sums are taken of all at once, and one gradient serves P and delta.

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
        self.symmetry, self.net, self.generator = symmetry, net, generator
        self.delta: dict[str, nn.Parameter] = {}
        if residual:
            for name, value in self.theta.items():
                noise = torch.randn(value.shape, generator=generator)
                self.delta[name] = nn.Parameter((1e-4 * noise).to(value))
        moving = set() if net is None else symmetry.groups.keys()
        self._moving = [name for name in self.theta if names(symmetry.layouts[name]) & moving]
        self._half = {name: value / 2 if name in self._moving else value for name, value in self.theta.items()}

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
        halves = {name: self._half[name] for name in self._moving}
        return mix_all(halves, self.symmetry.layouts, self.net.plans(check=False), self.symmetry.parents)

    def place(self, moved: dict[str, Tensor]) -> dict[str, Tensor]:
        """The point, as leaves that collect a gradient."""
        with torch.no_grad():
            point = _add(_add(self._half, self.delta), moved)
        return {name: value.detach().requires_grad_() for name, value in point.items()}

    def fuse(self, permutation: Permutation | None, weight: float) -> dict[str, Tensor]:
        """The fused network, weight theta + (1 - weight) pi(theta) + delta, with a hard permutation."""
        with torch.no_grad():
            return _add(self._blend(permutation, weight), self.delta)

    def settle(self, permutation: Permutation | None, weight: float) -> None:
        """Be the fused network from now on: the point is where it lies, and delta is all that still moves it."""
        self._half, self._moving, self.net = self._blend(permutation, weight), [], None

    def _blend(self, permutation: Permutation | None, weight: float) -> dict[str, Tensor]:
        if permutation is None:
            return self.theta
        layouts = self.symmetry.layouts
        return {k: torch.lerp(permutation.move(v, layouts[k]), v, weight) for k, v in self.theta.items()}

    def residual_length(self) -> float:
        """|delta|."""
        squares = [value.detach().square().sum() for value in self.delta.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _add(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of tensors of the same name, all at once; a tensor that the others do not have stays as it is."""
    if not others:
        return dict(tensors)
    sums = add_all([tensors[name] for name in others], list(others.values()))
    return {**tensors, **dict(zip(others, sums, strict=True))}
