"""A training step on CUDA that is captured once in a CUDA graph and then replayed, with new batches."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onebasin.torch_internals import tree_flatten, tree_unflatten

Run = Callable[[Any], Any]
CaptureGraph = Callable[[Run, Any], tuple[Callable[[], object], Any]]

NUM_WARMUP = 3
"""Eager calls before a capture, in which kernels are compiled and libraries allocate their workspaces."""

_STEPS_PER_GRAPH = 4
_REPORT_EVERY = 100


class CapturedStep:
    """Runs a step: eagerly for a few calls, then as a CUDA graph, which takes Python no time.

    An eager step of a small network takes as long as Python needs to launch its kernels; a replayed one takes as long as
    the kernels do. Each batch is copied to where the graph reads it. A batch whose shapes differ from those of the captured
    one is run eagerly. A step that waits for the device (``.item()``, a branch on a value) cannot be captured.

    Args:
        run: Computes the step for a batch. Between calls nothing that it takes from the host may change, except the tensors
            of the batch. Tensors in its result must be detached, so that no autograd graph is alive at the next call.
        capture: Whether to use a graph at all.
        device: Where the step runs.
        fallback: What to do with a step that cannot be captured: run it eagerly from then on, with a warning, or raise. The
            fallback runs a failed step again, so a step must not advance its own data before it fails.
        unroll: Steps per graph, which all get the same batch. An eager call runs one step.
        capture_graph: Returns a function that replays ``run(batch)``, and its result. Tests give one that needs no GPU.
    """

    def __init__(
        self,
        run: Run,
        capture: bool,
        device: torch.device,
        fallback: bool = True,
        unroll: int = 1,
        capture_graph: CaptureGraph | None = None,
    ):
        self._run, self._capture, self._device = run, capture, device
        self._fallback, self._unroll = fallback, unroll
        stream = self._stream = _capturable_stream(device) if capture and device.type == "cuda" else None
        self._capture_graph = capture_graph or (lambda run, batch: _capture_cuda_graph(run, batch, stream))
        self._num_calls = 0
        self._replay: Callable[[], object] | None = None
        self._result: Any = None
        self._batch: tuple[list[Any], Any] = ([], None)

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph by now."""
        return self._replay is not None

    def __call__(self, batch: Any = None) -> Any:
        """Run a step. The next call overwrites the tensors of the result."""
        self._num_calls += 1
        if not self._capture or self._num_calls <= NUM_WARMUP:
            return self._run_eagerly(batch)
        if self._fallback and self._num_calls == NUM_WARMUP + 1:
            return self._run_without_sync(batch)
        if self._replay is None:
            self._try_capture(batch)
        if self._replay is None or not self._load(batch):
            return self._run_eagerly(batch)
        self._replay()
        return self._result

    def _run_without_sync(self, batch: Any) -> Any:
        """An eager step that raises if it waits for the device; it is then run again without that check."""
        try:
            with _forbid_sync(self._device):
                return self._run_eagerly(batch)
        except RuntimeError as error:
            reason = str(error)
        # Outside the handler, because there the traceback would keep the failed step's autograd graph alive. Its nodes
        # belong to the capture stream, which is dropped here, and the next backward pass would go through them.
        self._fall_back(reason)
        return self._run_eagerly(batch)

    def _run_eagerly(self, batch: Any) -> Any:
        if self._stream is None:
            return self._run(batch)
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                return self._run(batch)
        finally:
            outer.wait_stream(self._stream)

    def _try_capture(self, batch: Any) -> None:
        leaves, structure = tree_flatten(batch)
        self._batch = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        try:
            with _without_collector():
                self._replay, self._result = self._capture_graph(self._run_unrolled, tree_unflatten(*self._batch))
        except RuntimeError as error:
            if not self._fallback:
                raise
            self._fall_back(str(error))

    def _run_unrolled(self, batch: Any) -> Any:
        return [self._run(batch) for _ in range(self._unroll)][-1]

    def _load(self, batch: Any) -> bool:
        """Copy a batch to where the graph reads it, if its shapes and plain values are those of the captured one."""
        leaves, structure = tree_flatten(batch)
        own, expected = self._batch
        if structure != expected or not all(map(_fits, own, leaves)):
            return False
        for place, leaf in zip(own, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        return True

    def _fall_back(self, reason: str) -> None:
        self._capture, self._stream = False, None
        warnings.warn(
            f"the step cannot be captured in a CUDA graph and is run eagerly, which is slower ({reason.splitlines()[0]}); "
            "capture=False does so without a warning",
            stacklevel=4,
        )


def run_steps(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    capture: bool = False,
    capture_graph: CaptureGraph | None = None,
) -> Iterator[int]:
    """Run a step that draws its own batches many times; with `capture` as CUDA graphs, or an error if that is impossible.

    Yields:
        The number of steps done, about every hundred steps and at the end. On CUDA they were launched and may still run:
        nothing here waits for the device.
    """
    run = CapturedStep(lambda _: step(), capture, device, False, _STEPS_PER_GRAPH, capture_graph)
    done = 0
    while done < num_steps:
        count = 1
        if done + _STEPS_PER_GRAPH <= num_steps:
            run()
            count = _STEPS_PER_GRAPH if run.is_captured else 1
        else:
            step()
        done += count
        if done % _REPORT_EVERY < count or done == num_steps:
            yield done


def _fits(own: Any, leaf: Any) -> bool:
    if isinstance(own, Tensor):
        return isinstance(leaf, Tensor) and (own.shape, own.dtype) == (leaf.shape, leaf.dtype)
    return type(own) is type(leaf) and own == leaf


def _capture_cuda_graph(run: Run, batch: Any, stream: torch.cuda.Stream | None) -> tuple[Callable[[], object], Any]:
    graph = torch.cuda.CUDAGraph()
    # Only this thread is restricted: others, such as those of a data loader, may use the device meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = run(batch)
    return graph.replay, result


def _capturable_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, or a new one if that is the default stream, which cannot be captured."""
    current = torch.cuda.current_stream(device)
    return torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Within it, Python collects no cycles: freeing what an earlier step held on the device can invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _forbid_sync(device: torch.device) -> Iterator[None]:
    """Within it, PyTorch raises where it would wait for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this mode misses some waits; the capture finds those
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
