"""Running a module of the user's so that neither the module nor the process is changed by it, whatever other threads do."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onebasin.programs.calls import Call
from onebasin.programs.snapshots import ModuleSnapshot
from onebasin.torch_internals import BatchNorm, tree_map

LOCK = threading.RLock()
"""Held while a trace runs a module or seeds the global generator: two threads may trace the same module at once."""


@contextlib.contextmanager
def isolated(model: nn.Module, call: Call) -> Iterator[ModuleSnapshot]:
    """Put a module into eval mode to run it, and leave everything as it was afterwards.

    Other threads may run other modules meanwhile. Modes, attributes and hooks of this one are restored, warnings and logs
    of this thread are dropped, and the global generator is restored if the module seeds it.

    Args:
        model: the module.
        call: what it will be called with.

    Yields:
        What the modules held before.
    """
    with LOCK, quiet():
        snapshot = ModuleSnapshot(model, call.leaves)
        seed, numbers = torch.initial_seed(), torch.get_rng_state()
        try:
            for module in model.modules():  # eval() may be overridden
                module.training = False
            yield snapshot
        finally:
            snapshot.restore()
            if torch.initial_seed() != seed:
                torch.set_rng_state(numbers)


def run_module(model: nn.Module, call: Call, training: bool = False, state: Mapping[str, Tensor] | None = None) -> Any:
    """Call a module that is `isolated`.

    Args:
        model: the module.
        call: its arguments.
        training: use train mode, as the module's own ``train()`` sets it; norms do not count their batches.
        state: parameters and buffers that are used instead of the module's own.
    """
    if training:
        model.train()
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.num_batches_tracked = None
    args, kwargs = tree_map(lambda leaf: leaf, (call.args, call.kwargs))  # the module may write into lists and dicts
    if state:
        return torch.func.functional_call(model, dict(state), args, kwargs)
    return model(*args, **kwargs)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, without the fused attention path, and restore every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with UnfusedAttention():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class UnfusedAttention(TorchFunctionMode):
    """Keeps the attention layers of PyTorch from their fused path, which calls no submodules, in this thread alone.

    The layers leave that path if any function mode is active.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


_LOGGERS = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes", "export._trace")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop this thread's warnings, and its logs about PyTorch's own internals: what matters comes as an exception."""
    thread = threading.get_ident()
    rule: Any = ("ignore", _ThreadPattern(thread), Warning, None, 0)
    loggers = [logging.getLogger(f"torch.{name}") for name in _LOGGERS]

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread

    try:
        warnings.filters.insert(0, rule)  # pyright: ignore[reportAttributeAccessIssue]
        for logger in loggers:
            logger.addFilter(is_shown)
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread may have replaced the list; the rule is harmless there
            warnings.filters.remove(rule)  # pyright: ignore[reportAttributeAccessIssue]
        for logger in loggers:
            logger.removeFilter(is_shown)


class _ThreadPattern:
    """In place of the pattern of a warning filter: matches every message, in one thread.

    ``warnings.catch_warnings`` would silence all threads, and overlapping uses of it would leave filters behind.
    """

    def __init__(self, thread: int):
        self._thread = thread

    def match(self, message: str) -> bool:
        return threading.get_ident() == self._thread


class MutedStream:
    """A stream that drops what the thread that made it writes, and passes on what other threads write."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Drop the text, or pass it on."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
