"""What the benchmarks of cost share: clocks, peaks of the machine, and workers that may fail without losing a record."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import PeakMemory

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]


def check_device(device: str) -> None:
    """End with a sentence where a device is asked for that is not here."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"error: --device {device} needs a GPU and a PyTorch built for it; neither was found together here")


def check_files(out: Path | None, *peers: str | None) -> None:
    """End with a sentence where an interpreter or folder of a peer is not there, or records cannot be written."""
    for peer in peers:
        if peer is not None and shutil.which(peer) is None and not Path(peer).is_dir():
            sys.exit(f"error: {peer} is neither an interpreter nor a folder")
    if out is not None and not out.resolve().parent.is_dir():
        sys.exit(f"error: --out: the folder {out.resolve().parent} does not exist")


def find_commit() -> str:
    """The commit that is measured: from the environment where there is no repository."""
    if "ONEBASIN_COMMIT" in os.environ:
        return os.environ["ONEBASIN_COMMIT"]
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def describe_machine(device: str) -> Record:
    """What a record needs to be compared with another one."""
    commit = find_commit()
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "one core"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "commit": commit}


def measure_peaks(device: str) -> Record:
    """Flops a second of a large matrix product, in the precision that is set, and bytes a second of a large copy."""
    on_cuda = device.startswith("cuda")
    n = 8192 if on_cuda else 2048
    a, b, c = (torch.rand(n, n, device=device) for _ in range(3))
    flops = 2 * n**3 / time_call(lambda: torch.mm(a, b, out=c), device)
    source, place = (torch.ones(1 << 28 if on_cuda else 1 << 25, device=device) for _ in range(2))
    return {"flops_s": flops, "bytes_s": 2 * source.nbytes / time_call(lambda: place.copy_(source), device)}


def read_clock(device: str) -> float:
    """Seconds: on the CPU those that this process computed (one thread), so that others on the machine do not count."""
    return time.perf_counter() if device.startswith("cuda") else time.process_time()


def time_call(call: Callable[[], Any], device: str, seconds: float = 0.3, least: int = 3, most: int = 50) -> float:
    """Seconds of one call: on CUDA the median of bursts, as in a training loop; on the CPU the least, by `read_clock`."""
    on_cuda = device.startswith("cuda")
    begin = time.perf_counter()
    call()
    if not on_cuda and time.perf_counter() - begin > 10 * seconds:  # no need to repeat what takes so long
        least = 1
    burst = 10 if on_cuda else 1
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < least or (time.perf_counter() - begin < seconds and len(samples) < most):
        if on_cuda:
            torch.cuda.synchronize()
        start = read_clock(device)
        for _ in range(burst):
            call()
        if on_cuda:
            torch.cuda.synchronize()
        samples.append((read_clock(device) - start) / burst)
        if burst > 1 and samples[-1] > seconds:
            burst = 1
    return sorted(samples)[len(samples) // 2] if on_cuda else min(samples)


def measure_bytes(call: Callable[[], Any], device: str) -> int:
    """The most memory held in a call beyond what was held before."""
    if not device.startswith("cuda"):
        with PeakMemory() as memory:
            call()
        return memory.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def attempt(measure: Callable[[], Record]) -> Record:
    """What was measured, or why nothing was."""
    try:
        return measure()
    except Exception as error:  # a row that fails is a row
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}


def run_sizes(python: str, module: str, arguments: Sequence[str], sizes: Sequence[int], limit: float) -> Iterator[Record]:
    """Measure sizes, smallest first, in a process of its own, which prints a line of JSON for each.

    A size at which the process dies is a record that says so, and another process goes on behind it. A size that takes more
    than `limit` seconds ends the list: the next ones would take longer.
    """
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    fixed = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **fixed, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    left = list(sizes)
    while left:
        command = [python, "-m", module, "--worker", *arguments, "--sizes", *map(str, left)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
            ) as process,
        ):
            late = threading.Event()
            while left and (line := _read_line(process, limit, late)):
                if line.startswith("{"):
                    yield {"size": left.pop(0), **json.loads(line)}
            process.wait()
            if late.is_set():
                yield {"size": left[0], "failed": f"not done in {limit:.0f} s"}
                return
            if left:
                errors.seek(0)
                said = [line for line in errors.read().splitlines() if ": " in line]
                yield {"size": left.pop(0), "failed": said[-1][:200] if said else f"ended with {process.returncode}"}


def _read_line(process: subprocess.Popen[str], limit: float, late: threading.Event) -> str:
    """The next line; nothing if the process ended, or was ended because it took too long."""
    timer = threading.Timer(limit, lambda: (late.set(), process.kill()))
    timer.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    timer.cancel()
    return line


def append(path: Path | None, record: Record) -> None:
    """Keep a record as soon as there is one: a line of JSON."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def say(record: Record) -> None:
    """What a worker prints: a line for one size."""
    print(json.dumps(record), file=sys.stdout, flush=True)
