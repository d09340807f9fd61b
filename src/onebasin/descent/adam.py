# pyright: reportIndexIssue=false
"""Adam on a few tensors, by one launch each on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onebasin.operator.launching import runs_on

_BLOCK = 512  # numbers a program


class Optimizer(Protocol):
    """What a step of a descent needs."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Move what has a gradient."""


def make_adam(params: Sequence[Tensor], rates: Sequence[float]) -> Optimizer:
    """Adam with a rate for each tensor, in the fastest form there is for them; a CUDA graph can hold its step."""
    device = params[0].device if params else torch.device("cpu")
    if all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and runs_on(p.device) for p in params) and params:
        return LaunchedAdam(params, rates)
    groups = [{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)]
    return torch.optim.Adam(groups, fused=device.type in ("cpu", "cuda"), capturable=device.type == "cuda")


class LaunchedAdam:
    """``torch.optim.Adam`` with its default betas, for float32 tensors on CUDA.

    PyTorch's fused Adam gives a program 65,536 numbers: two plans of 512 units are eight programs, on a GPU that runs a
    hundred at a time. Steps are counted for all tensors together: one that has a gradient has it at every step.
    """

    def __init__(self, params: Sequence[Tensor], rates: Sequence[float]):
        self._params, self._rates = list(params), list(rates)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]
        self._count = torch.zeros((), device=self._params[0].device)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self._params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move what has a gradient. Nothing is read back."""
        from onebasin.descent.adam_kernel import step_adam

        self._count += 1
        for p, rate, moments in zip(self._params, self._rates, self._moments, strict=True):
            if p.grad is not None:
                grid = (-(-p.numel() // _BLOCK),)
                step_adam[grid](p, p.grad.contiguous(), *moments, self._count, p.numel(), rate, BLOCK=_BLOCK, num_warps=4)
