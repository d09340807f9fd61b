"""What `benchmarks.align` compares: our methods, the authors' package, `rebasin` 0.0.47, a plain weight matching.

``python -m benchmarks.solvers NETWORK SOLVER`` runs one of them, or several, in this process and prints a record of each. A
solver runs again where the first time is short, some times where it is very short, and the median of those counts: by then
libraries are loaded and kernels compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from benchmarks.apply import vision
from benchmarks.pairs import Pair, load_pair
from benchmarks.plain_matching import match_plainly
from onebasin.cli.torchvision_operators import declare_missing_operators
from onebasin.relaxation import hardening

State = dict[str, torch.Tensor]
NETWORKS = ("mlp", "vgg11", "vgg13", "vgg16", "vgg19", "resnet18", "resnet50", "vit_b_16", "gpt2")
CRITERION = nn.functional.cross_entropy


def make(name: str) -> tuple[nn.Module, Any]:
    """A network with random weights and an example input."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers).eval(), torch.rand(1, 784)
    if name == "gpt2":
        declare_missing_operators()  # transformers imports it
        import transformers

        config = transformers.GPT2Config(use_cache=False)
        return transformers.GPT2LMHeadModel(config).eval(), torch.zeros(1, 8, dtype=torch.long)
    model, _ = vision(name)
    if name.startswith("vgg"):  # as in the example of the paper's authors
        model.classifier = nn.Linear(512 * 7 * 7, 10)
    size = 224 if name == "vit_b_16" else 64
    return model.eval(), torch.rand(1, 3, size, size)


@dataclass
class Task:
    """Permute `model` so that it fits `to`; a trained pair comes with data."""

    model: nn.Module
    to: nn.Module
    inputs: Any
    pair: Pair | None = None


@dataclass
class Answer:
    """A permuted state, the steps or sweeps it took, and seconds of the parts, where they are known."""

    state: State
    steps: int = 0
    tracing: float | None = None
    solving: float | None = None
    assigning: float | None = None


# ------------------------------------------------------------------------------------------------------------------- ours


def solve_ours(task: Task, **options: Any) -> Answer:
    """`onebasin.align`; what is not given has its default."""
    begin = time.perf_counter()
    symmetry = ob.symmetry(task.model, task.inputs)
    traced = time.perf_counter()
    with _timed_assignments() as spent:
        found = ob.align(task.model, to=task.to, symmetry=symmetry, **options)
    done = time.perf_counter()
    steps = [entry for entry in found.history if entry["by"] != "polish" and ("hard" in entry or "sweep" in entry)]
    count = steps[-1].get("step", steps[-1].get("sweep", 0)) + 1 if steps else 0
    return Answer(found.model.state_dict(), count, traced - begin, done - traced, sum(spent))


def solve_on_data(task: Task, method: Any, objective: ob.Objective) -> Answer:
    """`onebasin.align` on the training data of a pair."""
    assert task.pair is not None
    return solve_ours(task, method=method, objective=objective, data=task.pair.batches)


@contextlib.contextmanager
def _timed_assignments():
    """Within it, how long each call of the solver of assignments took."""
    spent: list[float] = []
    plain = hardening.assign_all

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        result = plain(*args)
        spent.append(time.perf_counter() - begin)
        return result

    hardening.assign_all = timed
    try:
        yield spent
    finally:
        hardening.assign_all = plain


# ------------------------------------------------------------------------------------------------------------------ peers


def solve_authors(task: Task, kind: str) -> Answer:
    """Their network with the settings of their examples: L1 and a step of 10 for copies, L2 or Mid and 0.1 for pairs."""
    from rebasin import RebasinNet, loss

    begin = time.perf_counter()
    device = next(task.model.parameters()).device
    with contextlib.redirect_stdout(sys.stderr):
        net = RebasinNet(copy.deepcopy(task.model).cpu(), input_shape=tuple(task.inputs.shape))
    net.identity_init()
    net.to(device)
    net.reparamnet.to(device)
    target = copy.deepcopy(task.to)
    if kind == "mid":
        criterion: Any = loss.MidLoss(target, criterion=CRITERION)
    else:
        criterion = {"l1": loss.DistL1Loss, "l2": loss.DistL2Loss}[kind](target)
    optimizer = torch.optim.Adam(net.p.parameters(), lr=10.0 if kind == "l1" else 0.1)
    batches = task.pair.batches if kind == "mid" and task.pair is not None else [()]
    traced = time.perf_counter()
    num_steps, hard = 0, net
    while num_steps < 100:
        net.train()
        value = criterion(net(), *batches[num_steps % len(batches)])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        num_steps += 1
        if kind == "l1":
            net.eval()
            with torch.no_grad():
                hard = net()
                if float(criterion(hard)) == 0.0:
                    break
    net.eval()
    with torch.no_grad():
        hard = net()
    state = {key: value.detach().clone() for key, value in hard.state_dict().items()}
    return Answer(state, num_steps, traced - begin, time.perf_counter() - traced)


def solve_rebasin(task: Task) -> Answer:
    """Weight matching by `rebasin` 0.0.47."""
    from rebasin import PermutationCoordinateDescent

    begin = time.perf_counter()
    moved = copy.deepcopy(task.model)
    descent = PermutationCoordinateDescent(task.to, moved, task.inputs)
    traced = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        descent.rebasin()
    return Answer(moved.state_dict(), 0, traced - begin, time.perf_counter() - traced)


def solve_plainly(task: Task) -> Answer:
    """Algorithm 1 of Git Re-Basin; which axes move together it takes from our tracing, without our check."""
    begin = time.perf_counter()
    symmetry = ob.symmetry(task.model, task.inputs, verify=False)
    traced = time.perf_counter()
    target, source = ({key: value.detach() for key, value in m.state_dict().items()} for m in (task.to, task.model))
    state = match_plainly(target, source, symmetry).apply(source)
    return Answer(state, 0, traced - begin, time.perf_counter() - traced)


Solver = Callable[[Task], Answer]
COPY_SOLVERS: dict[str, Solver] = {
    "ours, default": solve_ours,
    "ours, descent alone": lambda task: solve_ours(task, method="sinkhorn", detect_copy=False),
    "ours, descent by entries": lambda task: solve_ours(task, method="sinkhorn", optimizer="adam", detect_copy=False),
    "ours, weight matching": lambda task: solve_ours(task, method="weight-matching"),
    "ours, sweeps alone": lambda task: solve_ours(task, method="weight-matching", detect_copy=False),
    "authors": lambda task: solve_authors(task, "l1"),
    "rebasin": solve_rebasin,
    "plain weight matching": solve_plainly,
}
PAIR_SOLVERS: dict[str, Solver] = {
    "ours, Sinkhorn L2": lambda task: solve_ours(task, method="sinkhorn"),
    "ours, Sinkhorn Mid": lambda task: solve_on_data(task, "sinkhorn", ob.Midpoint(CRITERION)),
    "ours, Sinkhorn Rnd": lambda task: solve_on_data(task, "sinkhorn", ob.RandomPoint(CRITERION)),
    "ours, the default on Mid": lambda task: solve_on_data(task, "auto", ob.Midpoint(CRITERION)),
    "ours, weight matching": lambda task: solve_ours(task, method="weight-matching"),
    "ours, activation matching": lambda task: solve_on_data(task, "activation-matching", ob.WeightDistance()),
    "ours, STE": lambda task: solve_on_data(task, "ste", ob.Midpoint(CRITERION)),
    "authors, L2": lambda task: solve_authors(task, "l2"),
    "authors, Mid": lambda task: solve_authors(task, "mid"),
    "rebasin": solve_rebasin,
    "plain weight matching": solve_plainly,
}


# ------------------------------------------------------------------------------------------------------------ one process


def make_task(network: str, pair: Path | None, device: str) -> Task:
    """A permuted copy, or a pair that was trained before."""
    if pair is not None:
        trained = load_pair(network, pair, device)
        inputs = trained.batches[0][0][:2]
        ob.symmetry(trained.target, inputs, verify=False)  # as below: the exporter is loaded before anything is measured
        return Task(trained.source, trained.target, inputs, trained)
    model, inputs = make(network)
    symmetry = ob.symmetry(model, inputs, verify=False)
    twin = copy.deepcopy(model)
    twin.load_state_dict(symmetry.random(torch.Generator().manual_seed(1)).apply(model))
    return Task(twin.to(device), model.to(device), inputs.to(device))


def run(task: Task, solver: Solver, device: str) -> tuple[dict[str, Any], Answer]:
    """Seconds by the clock and of the processors, seconds of the parts, and bytes held beyond what was held before."""
    before = _reset_peak(device)
    clock, processors = time.perf_counter(), time.process_time()
    answer = solver(task)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    record = {
        "seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processors,
        "bytes": _peak(device) - before, "steps": answer.steps, "tracing": answer.tracing, "solving": answer.solving,
        "assigning": answer.assigning,
    }  # fmt: skip
    return record, answer


def judge(task: Task, state: State) -> dict[str, Any]:
    """Whether a copy was found; of a pair the distance and the barrier, before and after."""
    if task.pair is None:
        return {"exact": all(torch.equal(state[key], value) for key, value in task.to.named_parameters())}
    moved = copy.deepcopy(task.model)
    moved.load_state_dict(state)
    distance = ob.WeightDistance().bind(task.to)
    result = {}
    for when, model in (("before", task.model), ("after", moved)):
        path = ob.linear_path(task.to, model, task.pair.evaluate, num_points=11, data=task.pair.batches[:4])
        result[f"barrier_{when}"] = path.barrier
        result[f"distance_{when}"] = float(distance(model.state_dict(), task.to.state_dict()).detach())
    return result


def _reset_peak(device: str) -> int:
    """Forget the most memory held so far; what is held now."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else _status("VmHWM")


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


_MOST_RUNS, _ENOUGH_SECONDS = 7, 1.0


def measure(network: str, solver: str, pair: Path | None, device: str, limit: int, again: float) -> dict[str, Any]:
    """A record of one solver: what it did, or why it did not.

    What took less than `again` seconds is done again, some times if it is short, and the median counts.
    """
    signal.signal(signal.SIGALRM, _stop)
    try:
        task = make_task(network, pair, device)
        signal.alarm(limit)
        solve = (COPY_SOLVERS if pair is None else PAIR_SOLVERS)[solver]
        record, answer = run(task, solve, device)
        first, runs = record, []
        while first["seconds"] < again and len(runs) < _MOST_RUNS and sum(r["seconds"] for r in runs) < _ENOUGH_SECONDS:
            del answer
            record, answer = run(task, solve, device)
            runs.append(record)
        if runs:
            record = sorted(runs, key=lambda r: r["seconds"])[len(runs) // 2]
            # The allocator keeps what the first run has freed, so that the others seem to need nothing.
            record |= {"first_seconds": first["seconds"], "runs": len(runs), "bytes": max(first["bytes"], record["bytes"])}
        return {**record, **judge(task, answer.state)}
    except Exception as error:  # of whatever kind, in whosever code: it is what this solver did
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return {"failed": f"{type(error).__name__}: {lines[0][:160]}"}
    finally:
        signal.alarm(0)


def _stop(*_: object) -> None:
    raise TimeoutError("not done in time")


def main() -> None:
    """Some solvers on one network, a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("solvers", nargs="+", metavar="SOLVER")
    parser.add_argument("--pair", type=Path, help="a file with a trained pair; without it a permuted copy is found")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit", type=int, default=600, help="seconds for one solver")
    parser.add_argument("--again", type=float, default=20, help="run it again if the first time took less seconds than this")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    environment = {"torch": torch.__version__, "machine": name, "threads": torch.get_num_threads()}
    for solver in options.solvers:
        record = measure(options.network, solver, options.pair, options.device, options.limit, options.again)
        print(json.dumps({"solver": solver, **record, **environment}), flush=True)


if __name__ == "__main__":
    main()
