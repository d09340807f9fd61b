"""The midpoint between a network and a soft permutation of it, plus a residual: the point whose cost re-basin minimises.

If the symmetry has scales and bases, the permuted units are multiplied by them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from onebasin.relaxation.rebasin_net import RebasinNet
from onebasin.symmetries import Symmetry, Transform
from onebasin.symmetries.layout import names
from onebasin.symmetries.mixing import mix_all
from onebasin.torch_internals import add_all


class SoftMidpoint:
    """(theta + pi_P(theta)) / 2 + delta, as a function of the logits of P, of scales and bases, and of delta.

    The forward and backward pass of a small network take a few dozen kernels, so preparing its parameters must not take
    hundreds: tensors of the same layout are permuted together, sums are taken in one call, P and delta share one gradient.

    Args:
        model: theta; copied.
        symmetry: Its groups are those that are permuted.
        net: The plans; None if nothing is permuted.
        residual: Whether there is a delta. Its initial entries are normal with a deviation of 1e-4.
        generator: For these entries.
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
        groups = set() if net is None else symmetry.groups.keys()
        self._permuted = [name for name in self.theta if names(symmetry.layouts[name]) & groups]
        # What the point has beside the permuted tensors and delta: theta / 2, or theta where nothing is permuted.
        self._fixed = {name: value / 2 if name in self._permuted else value for name, value in self.theta.items()}

    def backward(self, cost: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """Add the gradient of a cost of the point to that of the logits, and set it as the gradient of delta."""
        permuted = self.permute()
        point = self.make_leaves(permuted)
        cost(point).backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in point.items()}
        if permuted:
            torch.autograd.backward(list(permuted.values()), [gradients[name] for name in permuted])
        for name, value in self.delta.items():
            value.grad = gradients[name]

    def permute(self) -> dict[str, Tensor]:
        """pi_P(theta) / 2 for the tensors that are permuted, differentiable in the parameters of the net."""
        if self.net is None:
            return {}
        halves = {name: self._fixed[name] for name in self._permuted}
        return self.net.multiply(mix_all(halves, self.symmetry.layouts, self.net.plans(check=False), self.symmetry.parents))

    def make_leaves(self, permuted: dict[str, Tensor]) -> dict[str, Tensor]:
        """The point, as leaf tensors that collect a gradient."""
        with torch.no_grad():
            point = _add(_add(self._fixed, self.delta), permuted)
        return {name: value.detach().requires_grad_() for name, value in point.items()}

    def fuse(self, transform: Transform | None, weight: float) -> dict[str, Tensor]:
        """The fused network, weight theta + (1 - weight) pi(theta) + delta, with a hard permutation."""
        with torch.no_grad():
            return _add(self._blend(transform, weight), self.delta)

    def harden(self, transform: Transform | None, weight: float) -> None:
        """Make the fused network the point from now on, so that only delta can change it."""
        self._fixed, self._permuted, self.net = self._blend(transform, weight), [], None

    def _blend(self, transform: Transform | None, weight: float) -> dict[str, Tensor]:
        if transform is None:
            return self.theta
        return {key: torch.lerp(transform.move(key, value), value, weight) for key, value in self.theta.items()}

    def residual_norm(self) -> float:
        """|delta|."""
        squares = [value.detach().square().sum() for value in self.delta.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _add(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add tensors of the same name in one call; tensors that only the first mapping has stay as they are."""
    if not others:
        return dict(tensors)
    sums = add_all([tensors[name] for name in others], list(others.values()))
    return {**tensors, **dict(zip(others, sums, strict=True))}
