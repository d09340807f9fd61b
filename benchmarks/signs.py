"""The tanh networks of the paper's Table 2, trained apart and aligned by permutations, and by permutations with signs.

    python -m benchmarks.signs [--pairs N]

A sign of each unit can be changed in what makes it and in what reads it, because tanh is odd. Prints the barrier on the line
between two networks, mean and standard error over the pairs, and the p-value of Wilcoxon's signed-rank test against the same
way without signs; two minutes on one core.
"""

import argparse
import math
import statistics
from typing import Any

import torch
from scipy import stats
from torch import nn

import onebasin as ob
from experiments.tasks import TASKS, load, train_networks
from onebasin.landscape.evaluation import mean_loss


def main() -> None:
    """Train, align, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50, help="pairs of networks for each task (default 50)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signs: dict[str, Any] = {"kinds": "all", "scaling": ob.Scaling(steps=0)}
    print("| task | aligned by | test barrier | median | lower than without signs | p |\n|---|---|---|---|---|---|")
    for name in ("Pol1", "Pol3"):
        task = TASKS[name]
        stack = train_networks(task, list(range(2 * options.pairs)), "cpu")
        networks = [
            _take(task.make_model(), {key: value[n] for key, value in stack.items()}) for n in range(2 * options.pairs)
        ]
        train, test = load(task, "train"), load(task, "test")
        evaluate = mean_loss(task.loss, [(test.x, test.y)])
        data = [(train.x, train.y)]
        learned = {"data": data, "objective": ob.RandomPoint(task.loss)}
        ways: dict[str, dict[str, Any] | None] = {
            "as they are": None,
            "weight matching": {"method": "weight-matching"},
            "weight matching, signs": {"method": "weight-matching", **signs},
            "activation matching": {"data": data},
            "activation matching, signs": {"data": data, **signs},
            "learned by the default": learned,
            "learned by the default, signs": {**learned, **signs},
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for a, b in zip(networks[::2], networks[1::2], strict=True):
            for way, arguments in ways.items():
                moved = b if arguments is None else ob.align(b, to=a, example_inputs=train.x[:2], **arguments).model
                found[way].append(ob.linear_path(a, moved, evaluate, num_points=25).barrier)
        for way, barriers in found.items():
            error = statistics.stdev(barriers) / math.sqrt(len(barriers)) if len(barriers) > 1 else 0.0
            plain = found.get(way.removesuffix(", signs")) if way.endswith(", signs") else None
            lower = "" if plain is None else f"{sum(x < y for x, y in zip(barriers, plain, strict=True))} of {len(barriers)}"
            p = "" if plain is None else f"{stats.wilcoxon(barriers, plain).pvalue:.1g}"
            row = f"{statistics.mean(barriers):.4f} ± {error:.4f} | {statistics.median(barriers):.4f}"
            print(f"| {name} | {way} | {row} | {lower} | {p} |", flush=True)


def _take(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model.eval()


if __name__ == "__main__":
    main()
