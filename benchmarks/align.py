"""From two networks to the aligned one, everything counted, ours against peers: ``python -m benchmarks.align``.

A permuted copy of each network is aligned with the original by each solver, each in a process of its own (peers: in an
interpreter of their own), one after the other. Counted are tracing, optimisation and assignment; the models exist before.
Memory is the most that the process held beyond what it held before.

Peers are named by their interpreters: ``--authors PYTHON`` has `sinkhorn-rebasin` 0.0.2, ``--rebasin PYTHON`` has `rebasin`
0.0.47 (both import as `rebasin`); without them their columns stay empty.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from benchmarks.copies import make_network

State = dict[str, torch.Tensor]
NETWORKS = ("mlp", "vgg11", "vgg13", "vgg16", "vgg19", "resnet18", "resnet50", "vit_b_16", "gpt2")
QUICK = ("mlp", "vgg11", "resnet18")


def make(name: str) -> tuple[nn.Module, Any]:
    """A network with random weights and an example input."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers).eval(), torch.rand(1, 784)
    if name == "gpt2":
        import transformers

        config = transformers.GPT2Config(use_cache=False, return_dict=False)
        return transformers.GPT2LMHeadModel(config).eval(), torch.zeros(1, 8, dtype=torch.long)
    model, inputs = make_network(name)
    return model, torch.rand(1, 3, 224, 224) if name == "vit_b_16" else inputs


# ---------------------------------------------------------------------------------------------- one solver, in its process


def solve_ours(model: nn.Module, to: nn.Module, inputs: Any, method: str) -> tuple[State, int]:
    """`onebasin.align` with default arguments."""
    found = ob.align(model, to=to, example_inputs=inputs, method=method)
    steps = [entry for entry in found.history if "hard" in entry or "sweep" in entry]
    return found.model.state_dict(), steps[-1].get("step", steps[-1].get("sweep", 0)) + 1


def solve_authors(model: nn.Module, to: nn.Module, inputs: Any) -> tuple[State, int]:
    """Their network with the settings of their example: L1, Adam with a step of 10, at most 100 steps."""
    from rebasin import RebasinNet
    from rebasin.loss import DistL1Loss

    device = next(model.parameters()).device
    with contextlib.redirect_stdout(sys.stderr):
        net = RebasinNet(copy.deepcopy(model).cpu(), input_shape=tuple(inputs.shape))
    net.identity_init()
    net.to(device)
    net.reparamnet.to(device)
    criterion = DistL1Loss(copy.deepcopy(to))
    optimizer = torch.optim.Adam(net.p.parameters(), lr=10.0)
    num_steps, hard = 0, net
    while num_steps < 100:
        num_steps += 1
        net.train()
        loss = criterion(net())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            hard = net()
            if float(criterion(hard)) == 0.0:
                break
    return {key: value.detach().clone() for key, value in hard.state_dict().items()}, num_steps


def solve_rebasin(model: nn.Module, to: nn.Module, inputs: Any) -> tuple[State, int]:
    """Weight matching by `rebasin` 0.0.47."""
    from rebasin import PermutationCoordinateDescent

    moved = copy.deepcopy(model)
    descent = PermutationCoordinateDescent(to, moved, inputs)
    with contextlib.redirect_stdout(sys.stderr):
        descent.rebasin()
    return moved.state_dict(), 0


SOLVERS: dict[str, Callable[..., tuple[State, int]]] = {
    "ours, Sinkhorn": lambda *a: solve_ours(*a, method="sinkhorn"),
    "ours, weight matching": lambda *a: solve_ours(*a, method="weight-matching"),
    "authors": solve_authors,
    "rebasin": solve_rebasin,
}


def run_worker(network: str, solver: str, device: str) -> dict[str, Any]:
    """Plant a permutation and let one solver find it."""
    model, inputs = make(network)
    symmetry = ob.symmetry(model, inputs, verify=False)
    twin = copy.deepcopy(model)
    twin.load_state_dict(symmetry.random(torch.Generator().manual_seed(1)).apply(model))
    model, twin, inputs = model.to(device), twin.to(device), inputs.to(device)
    before = _reset_peak(device)
    begin = time.perf_counter()
    state, steps = SOLVERS[solver](twin, model, inputs)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    exact = all(torch.equal(state[key], value) for key, value in model.named_parameters())
    return {"seconds": seconds, "steps": steps, "exact": exact, "bytes": _peak(device) - before}


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


# ------------------------------------------------------------------------------------------------------------ all of them


def measure(network: str, solver: str, python: str, device: str, limit: int) -> dict[str, Any]:
    """A worker in a process of its own; what it says, or why it says nothing."""
    command = [python, "-m", "benchmarks.align", "--worker", network, solver, "--device", device]
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    record = {"network": network, "solver": solver, "device": device}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=root, env=environment)
    except subprocess.TimeoutExpired:
        return {**record, "failed": f"not done in {limit} s"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {**record, "failed": last[0][:200]}
    return {**record, **json.loads(done.stdout.splitlines()[-1])}


def describe(record: dict[str, Any] | None, reference: dict[str, Any] | None) -> str:
    """A cell of the table: seconds, exact or not, and how many times as long as ours."""
    if record is None:
        return "not here"
    if "failed" in record:
        return record["failed"][:40]
    times = f" ({record['seconds'] / reference['seconds']:.1f} x)" if reference and "seconds" in reference else ""
    return (
        f"{record['seconds']:.2f} s, {'exact' if record['exact'] else 'not exact'}, {record['bytes'] / 2**20:.0f} MiB{times}"
    )


def main() -> None:
    """Run every solver on every network and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, metavar=("NETWORK", "SOLVER"), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--quick", action="store_true", help="three networks, two minutes")
    parser.add_argument("--authors", help="an interpreter that has sinkhorn-rebasin")
    parser.add_argument("--rebasin", help="an interpreter that has rebasin 0.0.47")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one solver on one network")
    parser.add_argument("--out", type=Path, help="write the records to this JSON file")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run_worker(*options.worker, options.device)))
        return
    pythons = {"authors": options.authors, "rebasin": options.rebasin}
    records = []
    print("| network | " + " | ".join(SOLVERS) + " |\n|---|" + "---|" * len(SOLVERS))
    for network in QUICK if options.quick else options.networks:
        row: dict[str, dict[str, Any] | None] = {}
        for solver in SOLVERS:
            python = pythons.get(solver, sys.executable)
            row[solver] = measure(network, solver, python, options.device, options.limit) if python else None
        records += [record for record in row.values() if record]
        references = {"authors": row["ours, Sinkhorn"], "rebasin": row["ours, weight matching"]}
        cells = [describe(record, references.get(solver)) for solver, record in row.items()]
        print(f"| {network} | " + " | ".join(cells) + " |", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
