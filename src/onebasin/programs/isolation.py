"""Running a module of the user's so that neither the module nor the process is changed by it, whatever other threads do."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
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
    """Put a module into eval mode to run it, and leave everything as it was afterwards; yields what the modules held before.

    Modes, attributes and what code may keep elsewhere are restored, warnings and logs of this thread are dropped. The global
    generator is restored if the module seeds it, those of Python and NumPy if they were used. Other threads may run other
    modules meanwhile.
    """
    with LOCK, quiet():
        snapshot = ModuleSnapshot(model, call.leaves)
        seed, numbers = torch.initial_seed(), torch.get_rng_state()
        numpy: Any = sys.modules.get("numpy")
        of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
        try:
            for module in model.modules():  # eval() may be overridden
                module.training = False
            yield snapshot
        finally:
            snapshot.restore()
            if torch.initial_seed() != seed:
                torch.set_rng_state(numbers)
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)


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
    return torch.func.functional_call(model, dict(state), args, kwargs) if state else model(*args, **kwargs)


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
    """Keeps PyTorch's attention layers from their fused path, which calls no submodules, in this thread alone.

    The layers avoid that path while any function mode is active.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _list_loggers() -> list[logging.Logger]:
    """PyTorch's loggers. A filter of one does not apply to those below it."""
    known = logging.root.manager.loggerDict
    return [
        logger for name, logger in list(known.items()) if name.startswith("torch") and isinstance(logger, logging.Logger)
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop this thread's warnings, and its logs about PyTorch's own internals: what matters comes as an exception.

    ``warnings.catch_warnings`` would silence all threads, and overlapping uses of it would leave filters behind.
    """
    thread = threading.get_ident()
    # In place of the pattern of a filter: matches every message, in this thread.
    pattern = SimpleNamespace(match=lambda message: threading.get_ident() == thread)
    rule: Any = ("ignore", pattern, Warning, None, 0)

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread

    filters: Any = warnings.filters
    loggers = _list_loggers()
    try:
        filters.insert(0, rule)
        for logger in loggers:
            logger.addFilter(is_shown)
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has reset the filters
            filters.remove(rule)
        for logger in loggers:
            logger.removeFilter(is_shown)


class MutedStream:
    """A stream that drops what the thread that made it writes, and passes on what other threads write."""

    def __init__(self, stream: Any):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Drop the text, or pass it on."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self._stream.flush()
