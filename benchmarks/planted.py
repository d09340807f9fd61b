"""Planted permutations: is the permutation that made a copy found again? ``python -m benchmarks.planted``.

Ten-unit tanh networks as in Table 1 of the paper, random and trained on its two polynomials, are aligned with a random
permutation of themselves by the descent of Sinkhorn, with and without the final polish, and by weight matching. A
network counts if every entry of the permutation is right (equivalently, the cost is zero).
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob

# y on an interval of x, with noise of standard deviation 0.05, 100 points: the paper's protocol.
POLYNOMIALS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "Pol1": (lambda x: x + 3, -4.0, -2.0),
    "Pol3": (lambda x: (x - 3) ** 3, 2.0, 4.0),
}


def make_network(task: str, num_hidden: int, seed: int) -> nn.Module:
    """A tanh network of ten units per layer, trained unless the task is "Rnd"."""
    torch.manual_seed(seed)
    widths = [1, *[10] * num_hidden, 1]
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    if task in POLYNOMIALS:
        function, low, high = POLYNOMIALS[task]
        x = torch.empty(100, 1).uniform_(low, high)
        y = function(x) + 0.05 * torch.randn(100, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(300):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


def run_trial(trial: tuple[str, int, int]) -> dict[str, Any]:
    """Plant a permutation and look for it by each method."""
    task, num_hidden, seed = trial
    torch.set_num_threads(1)
    model = make_network(task, num_hidden, seed)
    symmetry = ob.symmetry(model, torch.zeros(1, 1), verify=False)
    planted = symmetry.random(torch.Generator().manual_seed(seed + 1))
    copy = planted.apply(model)
    record: dict[str, Any] = {"task": task, "hidden": num_hidden, "seed": seed}
    for name, options in {
        "sinkhorn": {"method": "sinkhorn", "detect_copy": False},
        "without polish": {"method": "sinkhorn", "detect_copy": False, "polish": False},
        "weight matching": {"method": "weight-matching", "order": "random", "detect_copy": False},
    }.items():
        result = ob.align(copy, to=model.state_dict(), symmetry=symmetry, **options)
        record[name] = {
            "exact": result.permutation == planted.inverse(),
            "cost": result.cost,
            "steps": len([entry for entry in result.history if entry["by"] != "polish"]),
            "seconds": result.seconds,
        }
    return record


def main() -> None:
    """Run all cells and print how many permutations were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=50, help="networks a cell")
    parser.add_argument("--first-seed", type=int, default=0, help="networks that no default was chosen on: 1000 and up")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    first = options.first_seed
    trials = [
        (t, h, s) for t in ("Rnd", "Pol3", "Pol1") for h in (2, 4, 8, 16) for s in range(first, first + options.models)
    ]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        records = pool.map(run_trial, trials, chunksize=5)
    methods = ("sinkhorn", "without polish", "weight matching")
    print(f"{'':15}" + "".join(f"{m:>18}" for m in methods) + f"{'most steps':>12}")
    for task in ("Rnd", "Pol3", "Pol1"):
        for hidden in (2, 4, 8, 16):
            cell = [r for r in records if r["task"] == task and r["hidden"] == hidden]
            counts = "".join(f"{sum(r[m]['exact'] for r in cell):>10} of {len(cell):<4}" for m in methods)
            name, steps = "random" if task == "Rnd" else task, max(r["sinkhorn"]["steps"] for r in cell)
            print(f"{name:6}{hidden:>3} hidden{counts}{steps:>10}")
    for label, chosen in (("2-8 hidden", (2, 4, 8)), ("all", (2, 4, 8, 16))):
        cell = [r for r in records if r["hidden"] in chosen]
        print(f"{label:15}" + "".join(f"{sum(r[m]['exact'] for r in cell):>10} of {len(cell):<4}" for m in methods))
    print(f"{time.perf_counter() - begin:.0f} s on {options.processes} processes")
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "records": records}) + "\n")


if __name__ == "__main__":
    main()
