"""Whole descents on permuted copies, ours and the authors' in turn: ``python -m benchmarks.copy_descents --authors FOLDER``.

Each side goes from two networks to the aligned one without being told that one is a copy: tracing, steps, looks at the hard
permutation and assignments are counted on both sides. The authors' package (`sinkhorn-rebasin` 0.0.2, in a folder) has the
settings of its example for copies, L1 and a step of 10, and looks after every step, which is how it can stop. Ours is L2
by default ("row-adam"), and looks when it finds it worth it; beside it stands ours with Adam by entries.

All run in one process, one after the other in each round, so that other users of the machine slow all of them down. Reported
is the median over the rounds, in seconds of the processor and by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measuring import Record, append, check_files, describe_machine
from benchmarks.solvers import NETWORKS, Answer, Task, judge, make_task, run, solve_authors, solve_ours

Solver = Callable[[Task], Answer]
OURS: dict[str, Solver] = {
    "ours": lambda task: solve_ours(task, method="sinkhorn", detect_copy=False),
    "ours, Adam by entries": lambda task: solve_ours(task, method="sinkhorn", detect_copy=False, optimizer="adam"),
}
AUTHORS: dict[str, Solver] = {"authors": lambda task: solve_authors(task, "l1")}


def measure(network: str, solvers: dict[str, Solver], rounds: int) -> list[Record]:
    """One record per solver: medians over the rounds, after a first that does not count where the network is small."""
    task = make_task(network, None, "cpu")
    found: dict[str, list[Record]] = {name: [] for name in solvers}
    for number in range(-(network == "mlp"), rounds):
        for name, solve in solvers.items():
            record, answer = run(task, solve, "cpu")
            if number >= 0:
                found[name].append({**record, **judge(task, answer.state)})
    records = []
    for name, runs in found.items():
        medians = {key: statistics.median(r[key] for r in runs) for key in ("seconds", "cpu_seconds")}
        exact = all(r["exact"] for r in runs)
        records.append({"network": network, "solver": name, **medians, "steps": runs[-1]["steps"], "exact": exact})
    return records


def describe(records: list[Record]) -> str:
    """Rows of the table; ratios are to the first record, ours."""
    rows = []
    for r in records:
        ratios = (f"{r[key] / records[0][key]:.2f}" for key in ("cpu_seconds", "seconds"))
        seconds = (f"{r[key]:.2f}" for key in ("cpu_seconds", "seconds"))
        cells = [r["network"], r["solver"], str(r["steps"]), "yes" if r["exact"] else "no", *seconds, *ratios]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measure every network and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=["mlp", "vgg11", "resnet18"])
    parser.add_argument("--authors", metavar="FOLDER", help="a folder that has sinkhorn-rebasin")
    parser.add_argument("--rounds", type=int, default=3, help="how often each solver runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    options = parser.parse_args()
    check_files(options.out, options.authors)
    torch.set_num_threads(options.threads)
    solvers = dict(OURS)
    if options.authors:
        sys.path.append(options.authors)
        solvers |= AUTHORS
    head = ["network", "solver", "steps", "exact", "CPU s", "clock s", "CPU s / ours", "clock s / ours"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    machine = {**describe_machine("cpu"), "threads": options.threads, "rounds": options.rounds}
    for network in options.networks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            records = measure(network, solvers, options.rounds)
        for record in records:
            append(options.out, {"what": "copy descents", **machine, **record})
        print(describe(records), flush=True)


if __name__ == "__main__":
    main()
