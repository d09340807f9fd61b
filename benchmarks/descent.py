"""A step of the descent on real networks beside its floor: ``python -m benchmarks.descent --authors PYTHON``.

A permuted copy of a network is aligned on L2 by the Sinkhorn descent. The floor of a step is its matrix products, counted
as they are run, at the speed of a large product in the same process. Beside it stand our step and two parts of it, the
distance with its gradient in the plans, and the plans with theirs in the logits; the general step, through a softly
permuted network, which other objectives take; and the authors' step on the same task (``--authors`` is an interpreter that
has `sinkhorn-rebasin` 0.0.2). The looks at the hard permutation, which `benchmarks.align` counts, are left out of both.

Times are seconds that one thread of the process computed, the least of several rounds. On a machine that others use its
speed comes and goes, so in each round everything is measured in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import onebasin as ob
from benchmarks.measuring import ROOT, Record, append, check_files, describe_machine, say
from benchmarks.solvers import NETWORKS, Task, make_task
from onebasin.matching.methods.sinkhorn import find_distance, make_optimizer, make_step
from onebasin.matching.problem import Problem
from onebasin.relaxation.objectives import as_objective, parameter_keys
from onebasin.tensors.states import read_state

NUM_WARM = 3  # steps before anything is measured: the plans are as sharp as early in a descent
LARGE = 2048  # side of the product that tells the speed of this machine
Parts = dict[str, Callable[[], Any]]


def our_parts(task: Task) -> Parts:
    """Our step, what it is made of but for Adam, and the general step."""
    symmetry = ob.symmetry(task.model, task.inputs, verify=False)
    source, target, keys = read_state(task.model), read_state(task.to), parameter_keys(task.model)
    objective = ob.WeightDistance(keys=keys)
    problem = Problem(symmetry, source, target, keys, objective, model=task.to)
    hidden = replace(problem, objective=as_objective(lambda params, target, batch: objective(params, target)))
    net, twin = (ob.RebasinNet(task.model, symmetry) for _ in range(2))
    step = make_step(problem, net, make_optimizer(net, "adam"))
    general = make_step(hidden, twin, make_optimizer(twin, "adam"))
    for _ in range(NUM_WARM):
        step(None)
        general(None)
    distance = find_distance(problem, net)
    assert distance is not None
    fixed = net.stacked_plans()
    gradients = {size: torch.zeros_like(stack) for size, stack in fixed.items()}

    def plan_there_and_back() -> None:
        torch.autograd.backward(list(net.stacked_plans().values()), list(gradients.values()))

    def measure_distance() -> None:
        distance(net.unstack(fixed), net.unstack(gradients))

    steps = {"step": lambda: step(None), "general step": lambda: general(None)}
    return {**steps, "distance": measure_distance, "plans": plan_there_and_back}


def authors_parts(task: Task) -> Parts:
    """The step of their examples."""
    from rebasin import RebasinNet, loss  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    with contextlib.redirect_stdout(io.StringIO()):
        net = RebasinNet(copy.deepcopy(task.model), input_shape=tuple(task.inputs.shape))
    net.identity_init()
    net.train()
    criterion = loss.DistL2Loss(copy.deepcopy(task.to))
    optimizer = torch.optim.Adam(net.p.parameters(), lr=0.1)

    def step() -> None:
        cost = criterion(net())
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()

    for _ in range(NUM_WARM):
        step()
    return {"step": step}


def count_flops(call: Callable[[], Any]) -> int:
    """Of the matrix products of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def measure(network: str, who: str, rounds: int) -> Record:
    """Seconds of every part and of a large product, and the flops of a step."""
    task = make_task(network, None, "cpu")
    parts = {"ours": our_parts, "authors": authors_parts}[who](task)
    a, b, c = (torch.rand(LARGE, LARGE) for _ in range(3))
    flops = count_flops(parts["step"])
    parts["large product"] = lambda: torch.mm(a, b, out=c)
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, run in parts.items():
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    least = {name: min(values) for name, values in seconds.items()}
    speed = 2 * LARGE**3 / least.pop("large product")
    return {"network": network, "who": who, "seconds": least, "flops": flops, "flops_s": speed, "floor": flops / speed}


def describe(ours: Record, authors: Record | None) -> str:
    """A row of the table, in milliseconds."""
    step, floor = ours["seconds"]["step"], ours["floor"]
    cells = [ours["network"], f"{ours['flops'] / 1e9:.1f}", f"{ours['flops_s'] / 1e9:.0f}"]
    cells += [f"{1e3 * value:.0f}" for value in (floor, ours["seconds"]["distance"], ours["seconds"]["plans"])]
    cells += [f"{1e3 * step:.0f} ({step / floor:.2f} x floor)", f"{1e3 * ours['seconds']['general step']:.0f}"]
    if authors is not None:
        theirs = authors["seconds"]["step"]
        cells += [f"{1e3 * theirs:.0f}", f"{theirs / step:.1f}", f"{theirs / floor:.1f}"]
    return "| " + " | ".join(cells) + " |"


def run_worker(python: str, network: str, who: str, rounds: int) -> Record:
    """Measure in a process of its own."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "benchmarks.descent", "--networks", network, "--rounds", str(rounds), "--worker", who]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every network and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=["mlp", "vgg11", "resnet18"])
    parser.add_argument("--authors", metavar="PYTHON", help="an interpreter that has sinkhorn-rebasin")
    parser.add_argument("--rounds", type=int, default=10, help="how often each part is measured")
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    parser.add_argument("--worker", choices=("ours", "authors"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_files(options.out, options.authors)
    torch.set_num_threads(1)
    if options.worker:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for network in options.networks:
                say(measure(network, options.worker, options.rounds))
        return
    head = ["network", "Gflop", "Gflop/s", "floor", "distance", "plans", "step", "general step"]
    head += ["authors' step", "authors / step", "authors / floor"] if options.authors else []
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    machine = describe_machine("cpu")
    for network in options.networks:
        pythons = {"ours": sys.executable, **({"authors": options.authors} if options.authors else {})}
        found = {who: run_worker(python, network, who, options.rounds) for who, python in pythons.items()}
        for record in found.values():
            append(options.out, {"what": "descent", **machine, **record})
        print(describe(found["ours"], found.get("authors")), flush=True)


if __name__ == "__main__":
    main()
