"""Exact assignments: SciPy, lapx and ours side by side, from scratch and from the duals of the problem before.

python -m benchmarks.assignments [--device cuda] [--quick] [--all] [--out FILE]

The problems are weight-matching scores of two networks trained on the digits (the first hidden layer in the third sweep;
warm starts have the duals of the second), plans in the middle of a Sinkhorn descent on the same networks (warm starts have
the duals of five steps before), scores of which five rows change, and a batch of 64 weight-matching problems. The scores
lie on the device; SciPy and lapx are charged with the way to the CPU. A time is the median of up to seven calls; on the CPU
it is that of one core, so that others on the machine do not count. Every answer is proven by its duals, and compared with
SciPy's where that was run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.measuring import check_device, check_files, describe_machine, read_clock
from onebasin.datasets import digits

SIZES = (64, 512, 2048, 8192)
LONGEST_HOST = 4096  # units: SciPy takes a minute and more for the largest problem


class Case(NamedTuple):
    """Two problems that follow each other."""

    name: str
    before: Tensor
    scores: Tensor


def train(width: int, seed: int, device: str, steps: int) -> nn.Sequential:
    """A network with two hidden layers, trained for seconds."""
    torch.manual_seed(seed)
    images, labels = (tensor.to(device) for tensor in digits("train"))
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        batch = slice(step * 200 % 1400, step * 200 % 1400 + 200)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


def sweep_scores(a: nn.Sequential, b: nn.Sequential, num_sweeps: int) -> list[Tensor]:
    """Weight-matching scores of the first hidden layer, one matrix for each sweep over both layers."""
    first, second, last = ([model[i].weight.detach() for model in (a, b)] for i in (1, 3, 5))  # pyright: ignore
    bias = [model[1].bias.detach() for model in (a, b)]  # pyright: ignore
    outer = torch.arange(len(first[0]), device=first[0].device)
    found = []
    for _ in range(num_sweeps):
        found.append(first[0] @ first[1].T + torch.outer(*bias) + second[0].T @ second[1][outer])
        inner = ob.assign(found[-1])
        outer = ob.assign(second[0] @ second[1][:, inner].T + last[0].T @ last[1])
    return found


def descent_plans(a: nn.Sequential, b: nn.Sequential, steps: tuple[int, ...], device: str) -> list[Tensor]:
    """The plan of the first hidden layer after some steps of a Sinkhorn descent on the distance of the weights."""
    symmetry = ob.symmetry(b, torch.zeros(2, 1, 8, 8, device=device))
    net = ob.RebasinNet(b, symmetry).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 0.2 * max(math.log10(len(b[1].weight)), 1.0))  # pyright: ignore
    target = {key: value.detach() for key, value in a.state_dict().items()}
    found = []
    for step in range(max(steps) + 1):
        if step in steps:
            with torch.no_grad():
                found.append(next(iter(net.plans().values())).clone())
        optimizer.zero_grad()
        ob.WeightDistance()(net(), target).backward()
        optimizer.step()
    return found


def make_cases(device: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    for n in sizes:
        a, b = (train(n, seed, device, 35 if n <= 2048 else 14) for seed in (0, 1))
        sweeps = sweep_scores(a, b, 3)
        yield Case(f"weight matching, n = {n}", sweeps[1], sweeps[2])
        if n <= 2048:
            yield Case(f"plan of a descent, n = {n}", *descent_plans(a, b, (20, 25), device))
            changed = sweeps[2].clone()
            changed[:5] += sweeps[2].std() * torch.randn_like(changed[:5])
            yield Case(f"five rows changed, n = {n}", sweeps[2], changed)
        if n == 512:
            noise = 0.3 * sweeps[1].std() * torch.randn(64, n, n, device=device)
            yield Case(f"64 of weight matching, n = {n}", sweeps[1] + noise, sweeps[2] + noise)


def median_ms(call: Callable[[], Any], device: str, seconds: float) -> float:
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (len(times) < 7 and time.perf_counter() - begin < seconds):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = read_clock(device)
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(1e3 * (read_clock(device) - start))
    return statistics.median(times)


def solve_by_scipy(scores: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    problems = scores.double().cpu().reshape(-1, *scores.shape[-2:]).numpy()
    found = [torch.from_numpy(linear_sum_assignment(problem, maximize=True)[1]) for problem in problems]
    return torch.stack(found).reshape(scores.shape[:-1])


def solve_by_lapx(scores: Tensor) -> Tensor:
    import lap

    problems = (-scores.double().cpu()).reshape(-1, *scores.shape[-2:]).numpy()
    found = [torch.from_numpy(lap.lapjvr(problem, return_cost=False)[1]) for problem in problems]  # pyright: ignore
    return torch.stack(found).reshape(scores.shape[:-1])


def measure(case: Case, device: str, seconds: float, takes_all: bool) -> dict[str, Any]:
    scores = case.scores
    columns, info = ob.assign(scores, return_info=True)  # kernels are compiled here
    earlier = ob.assign(case.before, return_info=True)[1]
    warm_info = ob.assign(scores, start=earlier, return_info=True)[1]
    calls = {
        "ours": lambda: ob.assign(scores),
        "ours, duals": lambda: ob.assign(scores, return_info=True),
        "ours, warm": lambda: ob.assign(scores, start=earlier),
        "ours, warm, duals": lambda: ob.assign(scores, start=earlier, return_info=True),
    }
    values = [info.value, warm_info.value]
    if scores.shape[-1] <= LONGEST_HOST or takes_all:
        calls |= {"SciPy": lambda: solve_by_scipy(scores)}
        if importlib.util.find_spec("lap") is not None:
            calls |= {"lapx": lambda: solve_by_lapx(scores)}
        values.append(scores.double().gather(-1, solve_by_scipy(scores).to(device)[..., None]).sum((-1, -2)))
    apart = max(((value - values[0]).abs() / values[0].abs()).max().item() for value in values)
    best = (scores.double() - earlier.column_duals.unsqueeze(-2)).argmax(-1).reshape(-1, scores.shape[-1])
    return {
        "case": case.name,
        "ms": {name: median_ms(call, device, seconds) for name, call in calls.items()},
        "largest_gap": max(info.gap.max().item(), warm_info.gap.max().item()),
        "values_apart": apart,
        "share_of_columns_kept": (earlier.columns == columns).double().mean().item(),
        "rows_in_conflict": statistics.mean(len(row) - len(row.unique()) for row in best),
    }


def print_table(records: list[dict[str, Any]]) -> None:
    names = ["SciPy", "lapx", "ours", "ours, warm", "ours, duals", "ours, warm, duals"]
    print(f"{'milliseconds':32}" + "".join(f"{name:>18}" for name in names) + f"{'rows in conflict':>18}{'gap':>9}")
    for record in records:
        cells = (f"{record['ms'][name]:.2f}" if name in record["ms"] else "-" for name in names)
        end = f"{record['rows_in_conflict']:>18.0f}{record['largest_gap']:>9.0e}"
        print(f"{record['case']:32}" + "".join(f"{cell:>18}" for cell in cells) + end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="no more than 512 units, shorter timings")
    parser.add_argument("--all", action="store_true", help="SciPy and lapx on the largest problem too, which takes minutes")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    check_device(options.device)
    check_files(options.out)
    if options.device == "cpu":
        torch.set_num_threads(1)
    sizes = tuple(n for n in options.sizes if n <= 512 or not options.quick)
    records = []
    for case in make_cases(options.device, sizes):
        records.append(measure(case, options.device, 0.3 if options.quick else 1.0, options.all))
        print(f"{case.name}: {json.dumps(records[-1]['ms'])}", flush=True)
    print_table(records)
    has_lapx = importlib.util.find_spec("lap") is not None
    print(f"lapx is {'installed' if has_lapx else 'not installed: SciPy solves on the CPU'}")
    if options.out:
        machine = describe_machine(options.device) | {"threads": torch.get_num_threads(), "lapx": has_lapx}
        options.out.write_text(json.dumps({**machine, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
