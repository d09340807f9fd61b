# pyright: reportIndexIssue=false
"""Adam on a few tensors, with one kernel launch per tensor on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onebasin.operator.launch import can_compile

_BLOCK = 512  # entries per program


class Optimizer(Protocol):
    """What a descent needs of an optimiser."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def step(self) -> object:
        """Update the parameters that have a gradient."""


def make_adam(params: Sequence[Tensor], rates: Sequence[float]) -> Optimizer:
    """The fastest Adam for these tensors, with a learning rate for each; a CUDA graph can capture its step."""
    device = params[0].device if params else torch.device("cpu")
    if params and all(
        p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and can_compile(p.device) for p in params
    ):
        return TritonAdam(params, rates)
    groups = [{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)]
    return torch.optim.Adam(groups, fused=device.type in ("cpu", "cuda"), capturable=device.type == "cuda")


class TritonAdam:
    """``torch.optim.Adam`` with its default betas, for float32 tensors on CUDA.

    PyTorch's fused Adam gives each program 65,536 entries: two plans of 512 units are eight programs, on a GPU that can run
    a hundred at a time. All tensors share one step count, so a tensor must have a gradient at every step or at none.
    """

    def __init__(self, params: Sequence[Tensor], rates: Sequence[float]):
        self._params, self._rates = list(params), list(rates)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]
        self._num_steps = torch.zeros((), device=self._params[0].device)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for p in self._params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, without reading anything back to the host."""
        from onebasin.descent.adam_kernel import adam_step

        self._num_steps += 1
        for p, rate, moments in zip(self._params, self._rates, self._moments, strict=True):
            if p.grad is not None:
                arguments = (p, p.grad.contiguous(), *moments, self._num_steps, p.numel(), rate)
                adam_step[(-(-p.numel() // _BLOCK),)](*arguments, BLOCK=_BLOCK, num_warps=4)
