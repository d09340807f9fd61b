# pyright: reportIndexIssue=false
"""Adam on a few tensors, with one kernel launch per tensor on CUDA, and one that looks at rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from onebasin.operator.launch import can_compile

_BLOCK = 512  # entries per program
_BETAS = (0.9, 0.999)


class Optimizer(Protocol):
    """What a descent needs of an optimiser."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def step(self) -> object:
        """Update the parameters that have a gradient."""

    def moments(self) -> dict[str, Tensor]:
        """The number of steps taken, and both moments of every parameter, as copies; empty before the first step."""
        ...

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Go on from what `moments` gave."""


def make_adam(params: Sequence[Tensor], rates: Sequence[float]) -> Optimizer:
    """The fastest Adam for these tensors, with a learning rate for each; a CUDA graph can capture its step."""
    device = params[0].device if params else torch.device("cpu")
    if params and all(
        p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and can_compile(p.device) for p in params
    ):
        return TritonAdam(params, rates)
    groups = [{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)]
    return TorchAdam(groups, fused=device.type in ("cpu", "cuda"), capturable=device.type == "cuda")


class TorchAdam(torch.optim.Adam):
    """PyTorch's Adam, whose moments can be taken out and put back."""

    def moments(self) -> dict[str, Tensor]:
        """See `Optimizer`."""
        result: dict[str, Tensor] = {}
        for number, p in enumerate(self._parameters()):
            if p in self.state:
                entries = self.state[p]
                result["num_steps"] = entries["step"].clone()
                result[f"mean.{number}"], result[f"square.{number}"] = (
                    entries["exp_avg"].clone(),
                    entries["exp_avg_sq"].clone(),
                )
        return result

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """See `Optimizer`."""
        for number, p in enumerate(self._parameters()):
            if f"mean.{number}" in moments:
                mean, square = (moments[f"{name}.{number}"].to(p).clone() for name in ("mean", "square"))
                num_steps = moments["num_steps"].to(p.device, torch.float32).clone()
                self.state[p] = {"step": num_steps, "exp_avg": mean, "exp_avg_sq": square}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class _OwnAdam:
    """Moments of tensors that share one step count: each must have a gradient at every step or at none."""

    def __init__(self, params: Sequence[Tensor], rates: Sequence[float]):
        self._params, self._rates = list(params), list(rates)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]
        self._num_steps = torch.zeros((), device=self._params[0].device if self._params else None)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for p in self._params:
            p.grad = None

    def moments(self) -> dict[str, Tensor]:
        """See `Optimizer`."""
        result = {"num_steps": self._num_steps.clone()}
        for number, (mean, square) in enumerate(self._moments):
            result[f"mean.{number}"], result[f"square.{number}"] = mean.clone(), square.clone()
        return result

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """See `Optimizer`; in place, where a graph may read them."""
        self._num_steps.copy_(moments["num_steps"])
        for number, (mean, square) in enumerate(self._moments):
            mean.copy_(moments[f"mean.{number}"])
            square.copy_(moments[f"square.{number}"])


class TritonAdam(_OwnAdam):
    """``torch.optim.Adam`` with its default betas, for float32 tensors on CUDA.

    PyTorch's fused Adam gives each program 65,536 entries: two plans of 512 units are eight programs, on a GPU that can run
    a hundred at a time.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, without reading anything back to the host."""
        from onebasin.descent.adam_kernel import adam_step

        self._num_steps += 1
        for p, rate, moments in zip(self._params, self._rates, self._moments, strict=True):
            if p.grad is not None:
                arguments = (p, p.grad.contiguous(), *moments, self._num_steps, p.numel(), rate)
                adam_step[(-(-p.numel() // _BLOCK),)](*arguments, BLOCK=_BLOCK, num_warps=4)


class RowAdam(_OwnAdam):
    """Adam that looks at rows: a step is divided by the geometric mean of an entry's size and the largest in its row.

    A row of logits is one choice among columns. Adam divides every entry by the size of its own gradients, so that all
    columns move equally far, and many steps pass before the best one stands out. Divided by the largest size in the row,
    they would move in proportion to their gradients: copies are found even sooner, but wide networks that were trained
    apart end at a higher cost. This is half way between the two. The entry with the largest gradients moves by the learning
    rate; as in Adam, the scale of the cost does not matter.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, without reading anything back to the host."""
        self._num_steps += 1
        mean_share, square_share = (1 - torch.pow(beta, self._num_steps) for beta in _BETAS)
        for p, rate, (mean, square) in zip(self._params, self._rates, self._moments, strict=True):
            if p.grad is None:
                continue
            mean.lerp_(p.grad, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(p.grad, p.grad, value=1 - _BETAS[1])
            size = (square / square_share).sqrt_()
            size.mul_(size.amax(-1, keepdim=True)).sqrt_().mul_(mean_share)
            p.addcdiv_(mean, size.masked_fill_(size == 0, torch.inf), value=-rate)  # without gradients nothing moves
