"""How the cost grows with width and depth, ours beside the peers': ``python -m benchmarks.growth [--device cuda]``.

MLPs 784-w-...-w-10: two hidden layers of 64 to 8192 units, then 2 to 64 hidden layers of 256. Measured are tracing, a step
of the descent on L2, and a sweep of weight matching over all groups, between two networks with random weights: seconds, and
the most memory held beyond the two models. The authors' package (``--authors PYTHON``) has the step, `rebasin` 0.0.47
(``--rebasin PYTHON``) the sweep. Every curve is a process of its own; a size that fails, or takes longer than ``--limit``
seconds, is a record that says so.

An exponent is the slope of a straight line through the upper half of the sizes, log against log. Floors: of time, the matrix
products at the speed of a large product; of memory, four matrices a group (logits, gradient, two moments of Adam) and the
softly permuted weights.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onebasin as ob
from benchmarks import measuring
from benchmarks.measuring import Record, append, attempt, measure_bytes, read_clock, run_sizes, say
from benchmarks.steps import CLASSES, INPUTS, authors_step, count_flops, make_pair, measure_step, our_step
from onebasin.matching.problem import Problem
from onebasin.tensors.states import read_state

SIZES = {"width": (64, 128, 256, 512, 1024, 2048, 4096, 8192), "depth": (2, 4, 8, 16, 32, 64)}
QUICK = {"width": (64, 128, 256, 512), "depth": (2, 4, 8)}
WIDTH, DEPTH = 256, 2  # of the networks whose other size grows
CURVES = ("ours, step", "ours, sweep", "authors", "rebasin")
WHAT = ("tracing", "step", "captured step", "sweep")


def shape(axis: str, size: int) -> tuple[int, int]:
    """Width and depth of the network of a size."""
    return (size, DEPTH) if axis == "width" else (WIDTH, size)


# ------------------------------------------------------------------------------------------------------------ the workers


def time_once(call: Callable[[], Any], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = read_clock(device)
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return read_clock(device) - begin


def measure_once(call: Callable[[], Any], device: str, count_memory: bool = True) -> Record:
    """Seconds of the faster of two calls (of the first if it takes long), and the memory of another one."""
    seconds = time_once(call, device)
    if seconds < 10:
        seconds = min(seconds, time_once(call, device))
    return {"seconds": seconds, "bytes": measure_bytes(call, device) if count_memory and seconds < 10 else None}


def measure_ours(axis: str, size: int, device: str, what: str) -> Record:
    model, to = make_pair(*shape(axis, size), device)
    inputs = torch.rand(1, INPUTS, device=device)
    # Its memory is not counted: torch.export does not run under what counts it.
    tracing = measure_once(lambda: ob.symmetry(to, inputs), device, count_memory=False) if what == "step" else {}
    symmetry = ob.symmetry(to, inputs, verify=False)
    if what == "step":

        def make() -> Any:
            return our_step(model, to, symmetry, "L2")

        rows = {"tracing": tracing, "step": attempt(lambda: measure_step(make, None, device, False))}
        if device.startswith("cuda"):
            rows["captured step"] = attempt(lambda: measure_step(make, None, device, True))
        return rows
    source, target = read_state(model), read_state(to)
    problem = Problem(symmetry, source, target, tuple(source), ob.WeightDistance().bind(to), model=to)
    method = ob.WeightMatching(max_sweeps=1, order="random")
    return {"sweep": measure_once(lambda: method.match(problem), device)}


def measure_authors(axis: str, size: int, device: str) -> Record:
    model, to = make_pair(*shape(axis, size), device)

    def make() -> Any:
        return authors_step(model, to, "L2", device)

    tracing = attempt(lambda: measure_once(make, device))
    return {"tracing": tracing, "step": attempt(lambda: measure_step(make, None, device, False))}


def measure_rebasin(axis: str, size: int, device: str) -> Record:
    from rebasin import PermutationCoordinateDescent  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    model, to = make_pair(*shape(axis, size), device)
    inputs = torch.rand(1, INPUTS, device=device)

    def make() -> Any:
        return PermutationCoordinateDescent(to, copy.deepcopy(model), inputs, logging_level=logging.ERROR)

    tracing = measure_once(make, device)
    return {"tracing": tracing, "sweep": measure_once(lambda: make().calculate_permutations(max_iterations=1), device)}


def work(curve: str, axis: str, device: str, sizes: Sequence[int]) -> None:
    """A worker: a line per size."""
    warnings.simplefilter("ignore")
    for size in sizes:
        with contextlib.redirect_stdout(io.StringIO()):
            if curve.startswith("ours"):
                found = attempt(lambda size=size: measure_ours(axis, size, device, curve.removeprefix("ours, ")))
            else:
                measure = measure_authors if curve == "authors" else measure_rebasin
                found = attempt(lambda size=size, measure=measure: measure(axis, size, device))
        say(found)


# --------------------------------------------------------------------------------------------------------------- the fits


def fit_exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of log y over log x through the upper half of the points."""
    upper = sorted(points)[len(points) // 2 :] if len(points) >= 4 else sorted(points)[-2:]
    if len(upper) < 2:
        return None
    return float(np.polyfit(*(np.log([p[i] for p in upper]) for i in (0, 1)), 1)[0])


def curves_of(records: Sequence[Record], axis: str, quantity: str) -> dict[str, list[tuple[float, float]]]:
    """(size, value) by "who, what", for seconds or bytes."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["axis"] != axis:
            continue
        for what in WHAT:
            value = (record.get(what) or {}).get(quantity)
            if value:
                found.setdefault(f"{record['curve'].split(',')[0]}, {what}", []).append((record["size"], value))
    return {name: sorted(points) for name, points in found.items()}


def floors_of(records: Sequence[Record], axis: str, quantity: str) -> dict[str, list[tuple[float, float]]]:
    """The same for the floors of a step."""
    sizes = sorted({record["size"] for record in records if record["axis"] == axis})
    points = []
    for size in sizes:
        width, depth = shape(axis, size)
        if quantity == "seconds":
            points.append((size, count_flops(width, "L2", depth) / records[0]["flops_s"]))
        else:
            weights = (INPUTS + CLASSES) * width + (depth - 1) * width**2
            points.append((size, 4.0 * (4 * depth * width**2 + weights)))
    return {"floor of a step": points}


def describe(records: Sequence[Record], axis: str) -> str:
    """A table: seconds per size, fitted exponents of time and memory, and memory at the largest size."""
    sizes = sorted({record["size"] for record in records if record["axis"] == axis})
    lines = [f"| {axis} | " + " | ".join(map(str, sizes)) + " | time grows as | memory | grows as |"]
    lines.append("|---" * (len(sizes) + 4) + "|")
    held = curves_of(records, axis, "bytes") | floors_of(records, axis, "bytes")
    for name, points in (curves_of(records, axis, "seconds") | floors_of(records, axis, "seconds")).items():
        times = dict(points)
        cells = [f"{1e3 * times[s]:.4g}" if s in times else "-" for s in sizes]
        memory = held.get(name, [])
        exponents = [fit_exponent(p) for p in (points, memory)]
        fits = ["-" if e is None else f"{axis}^{e:.2f}" for e in exponents]
        peak = f"{memory[-1][1] / 2**20:.4g} MiB" if memory else "-"
        lines.append(f"| {name} | " + " | ".join([*cells, fits[0], peak, fits[1]]) + " |")
    for record in (record for record in records if record["axis"] == axis):
        failures = [record.get("failed"), *[(record.get(what) or {}).get("failed") for what in WHAT]]
        lines += [f"\n{record['curve']} at {record['size']}: {failure}" for failure in failures if failure]
    return "\n".join(lines)


def draw(records: Sequence[Record], path: Path) -> None:
    """Time and memory against width and depth, log-log, with the floors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"ours": "C0", "authors": "C1", "rebasin": "C2", "floor of a step": "k"}
    lines = {"tracing": ":", "step": "-", "captured step": "-.", "sweep": "--"}
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for column, axis in enumerate(SIZES):
        for row, (quantity, scale, label) in enumerate((("seconds", 1e3, "milliseconds"), ("bytes", 2**-20, "MiB"))):
            panel = grid[row][column]
            for name, points in (curves_of(records, axis, quantity) | floors_of(records, axis, quantity)).items():
                who, _, what = name.partition(", ")
                marker = "" if who not in ("ours", "authors", "rebasin") else "o"
                look = {"color": styles[who], "linestyle": lines.get(what, "-"), "marker": marker, "markersize": 3}
                panel.loglog([p[0] for p in points], [scale * p[1] for p in points], linewidth=1, label=name, **look)
            panel.set(xlabel=axis, ylabel=label)
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
    grid[0][0].legend(fontsize=7)
    figure.suptitle(f"{records[0]['device']}, torch {records[0]['torch']}", fontsize=9)
    figure.savefig(path)


def main() -> None:
    """Measure every curve, print tables, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, half a minute")
    parser.add_argument("--axes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--curves", nargs="*", choices=CURVES, default=CURVES)
    parser.add_argument("--most", type=int, default=10**9, help="the largest size")
    parser.add_argument("--authors", metavar="PYTHON", help="an interpreter that has sinkhorn-rebasin")
    parser.add_argument("--rebasin", metavar="PYTHON", help="an interpreter that has rebasin 0.0.47")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one size of one curve")
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    parser.add_argument("--read", type=Path, help="measure nothing: take the records of this file")
    parser.add_argument("--draw", type=Path, help="draw the curves into this picture")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    measuring.check_device(options.device)
    measuring.check_files(options.out, options.authors, options.rebasin)
    if options.worker:
        work(*options.worker, options.device, options.sizes)
        return
    if options.read:
        if not options.read.is_file():
            parser.error(f"--read: there is no file {options.read}")
        records = [json.loads(line) for line in options.read.read_text().splitlines()]
    else:
        records = measure(options)
    for axis in options.axes:
        print(f"\nMilliseconds against {axis}:\n\n{describe(records, axis)}")
    if options.draw:
        draw(records, options.draw)


def measure(options: argparse.Namespace) -> list[Record]:
    """Run every curve in its process."""
    torch.set_num_threads(1)
    head = {"what": "growth", **measuring.describe_machine(options.device), **measuring.measure_peaks(options.device)}
    pythons = {"authors": options.authors, "rebasin": options.rebasin}
    records = []
    for axis in options.axes:
        sizes = [size for size in (QUICK if options.quick else SIZES)[axis] if size <= options.most]
        for curve in options.curves:
            python = pythons.get(curve, sys.executable)
            if not python:
                continue
            arguments = [curve, axis, "--device", options.device]
            for record in run_sizes(python, "benchmarks.growth", arguments, sizes, options.limit):
                records.append({**head, "axis": axis, "curve": curve, **record})
                append(options.out, records[-1])
                print(".", end="", file=sys.stderr, flush=True)
    return records


if __name__ == "__main__":
    main()
