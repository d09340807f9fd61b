"""What a row of the coverage table needs: a model, and calls of it at any batch size and length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int, int], Any]
"""Example inputs, drawn at random, of a batch size and a length: tokens, frames, nodes or pixels on a side."""


@dataclass(frozen=True)
class Example:
    """A model and what to feed it.

    Attributes:
        model: the module, with random weights.
        inputs: calls of it.
        length: of the call that is traced.
        others: lengths it is checked at; those that the module refuses are left out.
        is_text: whether it reads tokens, so that a single one is a call too.
        kind: what it is, where that shows in the model alone; goes before that of the row.
        before_check: replaces kernels that do not exist in float64, after the trace.
    """

    model: nn.Module
    inputs: Inputs
    length: int
    others: tuple[int, ...] = ()
    is_text: bool = False
    kind: str = ""
    before_check: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        library: where it comes from.
        name: its name there.
        make: the model and its inputs.
        kind: what it is, where the table has a line for that: "mixture of experts", "DETR", "U-Net".
        counted: the number of groups a person derives from the architecture, if one did.
        unverified: why its weights are not made: then it is traced on the meta device.
    """

    library: str
    name: str
    make: Callable[[], Example]
    kind: str = ""
    counted: int | None = None
    unverified: str = ""


class NotMade(Exception):
    """The model cannot be made, or nothing it takes is known: this says nothing about tracing."""


def images(channels: int = 3) -> Inputs:
    """Images with `length` pixels on a side."""
    return lambda batch, length: torch.randn(batch, channels, length, length)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Token ids; the first three are left to special tokens."""
    return torch.randint(3, vocabulary, (batch, length))
