"""A step of a descent on CUDA, recorded once as a graph and replayed with new batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onebasin.torch_internals import tree_flatten, tree_unflatten

Run = Callable[[Any], Tensor]
Record = Callable[[Run, Any], tuple[Callable[[], None], Tensor]]

# Before a step is recorded its kernels must have been compiled and its libraries have made their workspaces.
NUM_PLAIN = 3


class Step:
    """Runs a step, ``run(batch) -> cost``; after a few calls a recording of it, which Python has no part in.

    A step of a small network takes as long as Python takes to launch its kernels. Replayed, it takes as long as they do.
    The values of a batch are copied to where the recording reads them; a batch of another shape than the recorded one is run
    plainly. A step that waits for the device (``.item()``, a branch on a value) cannot be recorded: that is found out first,
    a warning says so, and every step is run plainly.

    Args:
        run: takes nothing from the host that changes between calls but the tensors of the batch, and returns the cost
            detached, so that nothing of its autograd graph is alive when the next call is recorded.
        capture: whether to record at all.
        device: where the step runs.
        record: makes a recording; for tests.
    """

    def __init__(self, run: Run, capture: bool, device: torch.device, record: Record | None = None):
        self._run, self._capture, self._device = run, capture, device
        self._record = record or self._record_graph
        # Warmed up and recorded on a stream of its own: the default one cannot be captured.
        self._stream = torch.cuda.Stream(device) if capture and device.type == "cuda" else None
        self._num_calls = 0
        self._replay: Callable[[], None] | None = None
        self._cost: Tensor | None = None
        self._batch: tuple[list[Any], Any] = ([], None)

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._replay is not None

    def __call__(self, batch: Any) -> Tensor:
        """Run a step; the cost it returns holds until the next call."""
        self._num_calls += 1
        if not self._capture or self._num_calls <= NUM_PLAIN:
            return self._plainly(batch)
        if self._num_calls == NUM_PLAIN + 1:
            return self._watch(batch)
        if self._replay is None:
            self._start(batch)
        if self._replay is None or not self._load(batch):
            return self._plainly(batch)
        assert self._cost is not None
        self._replay()
        return self._cost

    def _watch(self, batch: Any) -> Tensor:
        """A plain step in which waiting for the device is an error; where it is one, the step is run again without."""
        try:
            with _no_waiting(self._device):
                return self._plainly(batch)
        except RuntimeError as error:
            reason = str(error)
        # Not in the handler: there the traceback would keep the failed step's graph alive, whose nodes belong to the stream
        # that is left here, and the next backward pass would go through them.
        self._give_up(reason)
        return self._plainly(batch)

    def _plainly(self, batch: Any) -> Tensor:
        if self._stream is None:
            return self._run(batch)
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                return self._run(batch)
        finally:
            outer.wait_stream(self._stream)

    def _start(self, batch: Any) -> None:
        leaves, structure = tree_flatten(batch)
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            self._replay, self._cost = self._record(self._run, tree_unflatten(leaves, structure))
        except RuntimeError as error:
            self._give_up(str(error))
            return
        self._batch = leaves, structure

    def _load(self, batch: Any) -> bool:
        """Copy a batch to where the recording reads it, if it is of the same kind."""
        leaves, structure = tree_flatten(batch)
        mine, expected = self._batch
        if structure != expected or not all(map(_fits, mine, leaves)):
            return False
        for place, leaf in zip(mine, leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        return True

    def _record_graph(self, run: Run, batch: Any) -> tuple[Callable[[], None], Tensor]:
        """A CUDA graph of one step, which is not run by that."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a loader's, may go on as they like.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            cost = run(batch)
        return graph.replay, cost

    def _give_up(self, reason: str) -> None:
        self._capture, self._stream = False, None
        warnings.warn(
            f"the step cannot be captured in a CUDA graph and is run plainly, which is slower ({reason.splitlines()[0]}); "
            "capture=False does so without a warning",
            stacklevel=4,
        )


def _fits(place: Any, leaf: Any) -> bool:
    if isinstance(place, Tensor):
        return isinstance(leaf, Tensor) and (place.shape, place.dtype) == (leaf.shape, leaf.dtype)
    return type(place) is type(leaf) and place == leaf


@contextlib.contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Within it, PyTorch raises instead of waiting for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see everything: what it misses, the recording finds
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
