"""Running a training step many times: as it is, or captured in a CUDA graph and replayed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

# Run before a capture, so that libraries have made their workspaces and kernels are compiled. They train like any others.
_NUM_WARMUP = 3
_CHUNK = 100
_DONE = object()


def run_steps(step: Callable[[], None], num_steps: int, capture: bool = False, unroll: int = 4) -> Iterator[int]:
    """Run a step again and again, yielding the number done so far from time to time.

    Nothing waits for the device: on CUDA the numbers count steps that were issued.

    Args:
        step: takes nothing from the host that changes between calls, if it is to be captured.
        num_steps: how many.
        capture: record `unroll` steps as a CUDA graph after a few plain ones, and replay it. A small step then takes as
            long as its kernels do, and not as long as Python takes to launch them.
        unroll: steps in one graph.
    """
    done = 0
    if capture and num_steps >= _NUM_WARMUP + unroll:
        graph = _capture(step, unroll)
        done = _NUM_WARMUP
        while done + unroll <= num_steps:
            graph.replay()
            done += unroll
            if done % _CHUNK < unroll:
                yield done
    while done < num_steps:
        step()
        done += 1
        if done % _CHUNK == 0:
            yield done
    if done % _CHUNK:
        yield done


def _capture(step: Callable[[], None], unroll: int) -> torch.cuda.CUDAGraph:
    """Warm up and capture on a stream that is not the default one, which cannot be captured."""
    outer = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if outer == torch.cuda.default_stream() else outer
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for _ in range(_NUM_WARMUP):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(unroll):
                step()
    outer.wait_stream(stream)
    return graph


def interleave(runs: Sequence[Iterator[object]], device: torch.device | str) -> None:
    """Advance several runs in turn until all are done; on CUDA each on a stream of its own, so that they share the device.

    Small networks leave most of a GPU idle: five seeds side by side take little longer than one. What the runs have in
    common must be made before. The caller's stream waits for all of them, so that what they made can be read.
    """
    pending = [(run, _new_stream(device)) for run in runs]
    streams = [stream for _, stream in pending if stream is not None]
    while pending:
        left = []
        for run, stream in pending:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                if next(run, _DONE) is not _DONE:
                    left.append((run, stream))
        pending = left
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def _new_stream(device: torch.device | str) -> torch.cuda.Stream | None:
    if torch.device(device).type != "cuda":
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
