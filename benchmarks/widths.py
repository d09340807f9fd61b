"""Networks of different widths, trained apart on the digits: the narrow one is widened and aligned to the wide one.

    python -m benchmarks.widths [--pairs N] [--steps N] [--networks NAME ...]

prints, for each way to align them, the barrier on the line between them on test images and the midpoint accuracy; about ten
minutes a pair of transformers on one core. "Widened alone" is the line without any alignment.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import onebasin as ob
from benchmarks.rotations import CRITERION
from benchmarks.rotations import train as train_transformer
from onebasin.cli.digits_demo import make_mlp
from onebasin.cli.digits_demo import train as train_network
from onebasin.datasets import digits
from onebasin.landscape.evaluation import mean_loss


def _train_mlp(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return train_network(make_mlp(width), *digits("train"), seed)


NETWORKS = {
    "MLP of 32 and 64": (_train_mlp, 32, 64),
    "ViT of 32 and 48": (lambda seed, width: train_transformer(seed, width=width), 32, 48),
}


def main() -> None:
    """Train, widen, align, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of networks (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="steps that bases are learned for (default 300)")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="which (default all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = digits("train")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    evaluate = mean_loss(CRITERION, [digits("test")])
    line = {"objective": ob.RandomPoint(CRITERION, low=0.4, high=0.6), "data": batches}
    ways: dict[str, dict[str, Any] | None] = {
        "widened alone": None,
        "permutations, without data": {},
        "permutations, activation matching": {"data": batches, "method": "activation-matching"},
        "permutations, learned": {**line, "method": "sinkhorn", "init": "activation-matching"},
        "all kinds, without data": {"kinds": "all", "scaling": ob.Scaling(steps=0)},
        "all kinds, learned": {
            **line,
            "method": "activation-matching",
            "kinds": "all",
            "scaling": ob.Scaling(steps=options.steps),
        },
    }
    print("| network | aligned by | test barrier, each pair | mean | midpoint accuracy | ends | seconds |")
    print("|---|---|---|---|---|---|---|")
    for network in options.networks:
        make, narrow, wide = NETWORKS[network]
        pairs = [(make(2 * number, wide), make(2 * number + 1, narrow)) for number in range(options.pairs)]
        ends = ", ".join(f"{evaluate(model)['accuracy']:.1%}" for pair in pairs for model in pair)
        for name, arguments in ways.items():
            rows = []
            for target, model in pairs:
                begin = time.perf_counter()
                if arguments is None:
                    found = target, ob.widen(model, like=target, example_inputs=images[:2])
                else:
                    aligned = ob.align(model, to=target, example_inputs=images[:2], **arguments)
                    found = aligned.target, aligned.model
                seconds = time.perf_counter() - begin
                path = ob.linear_path(*found, evaluate, num_points=11)
                rows.append((path.barrier, path.metrics["accuracy"][5], seconds))
            barriers, middles, seconds = zip(*rows, strict=True)
            each = ", ".join(f"{barrier:.3f}" for barrier in barriers)
            middle = ", ".join(f"{value:.1%}" for value in middles)
            mean = f"{statistics.mean(barriers):.3f}"
            cells = (network, name, each, mean, middle, ends, f"{statistics.mean(seconds):.0f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
