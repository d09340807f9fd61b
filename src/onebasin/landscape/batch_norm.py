"""The statistics of batch norms, estimated anew after weights were mixed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from onebasin.landscape.batches import copy_model, run_batches
from onebasin.tensors.states import StateDict, read_state_dict
from onebasin.torch_internals import BatchNorm


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """The batch norms that keep statistics, by path."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, BatchNorm)}
    return {path: module for path, module in found.items() if module.running_mean is not None}


def reset_batch_norm(model: nn.Module, data: Iterable[Any]) -> StateDict:
    """Estimate the statistics of batch norms anew: the average over the batches, each batch counting the same.

    Everything but batch norm runs in eval mode, so dropout adds no noise. A model without batch norm comes back as it is.

    Args:
        model: left untouched, its statistics and modes too.
        data: batches, each inputs or a pair (inputs, target).

    Returns:
        A new state.

    >>> import torch
    >>> from torch import nn
    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> state = ob.reset_batch_norm(model, [torch.randn(32, 4) for _ in range(3)])
    >>> _ = model.load_state_dict(state)
    """
    ours = copy_model(model)
    reset_statistics(ours, data)
    return read_state_dict(ours)


def reset_statistics(model: nn.Module, data: Iterable[Any]) -> None:
    """`reset_batch_norm` in place, on a model of ours that is in eval mode."""
    norms = batch_norms(model)
    if norms:
        with estimating(norms.values()):
            run_batches(model, data)


@contextlib.contextmanager
def estimating(norms: Iterable[BatchNorm]) -> Iterator[None]:
    """Within it batch norms use the statistics of each batch, and average them from scratch."""
    before = [(norm, norm.momentum) for norm in norms]
    for norm, _ in before:
        norm.reset_running_stats()
        norm.momentum = None  # to PyTorch this means a plain average
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in before:
            norm.momentum = momentum
            norm.eval()


@contextlib.contextmanager
def using_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Within it the batch norms of a model of ours use the statistics of each batch, and leave those they keep alone."""
    norms = list(batch_norms(model).values())
    before = [(norm, norm.training, norm.track_running_stats) for norm in norms]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, training, tracking in before:
            norm.training, norm.track_running_stats = training, tracking
