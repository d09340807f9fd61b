"""Gradients where the caller has turned them off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def computing_gradients(function: F) -> F:
    """The same function, which computes gradients inside of ``torch.no_grad()`` and ``torch.inference_mode()`` too.

    Scripts that merge or evaluate networks often turn gradients off as a whole.
    """
    return cast(F, torch.inference_mode(False)(torch.enable_grad()(function)))
