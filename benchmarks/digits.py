"""Pairs of networks trained on the embedded digits, aligned by every method: ``python -m benchmarks.digits``.

Five pairs of an MLP, of a CNN with batch norm and of two small vision transformers. For each method the mean cost, barrier
and AUC on the test images, and the midpoint accuracy; batch-norm statistics are estimated anew along the line. It says
whether every method more than halves the barrier, and whether the best data-driven Sinkhorn is no worse than weight
matching.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.cli.digits_demo import ResidualCNN, make_mlp, train
from onebasin.datasets import digits

CRITERION = nn.functional.cross_entropy


class VisionTransformer(nn.Module):
    """Patches of an image, learned positions, pre-norm blocks of four heads, the mean of all patches at the end."""

    def __init__(
        self, width: int = 64, num_blocks: int = 1, image: tuple[int, int] = (1, 8), patch: int = 2, expansion: int = 2
    ) -> None:
        super().__init__()
        num_channels, size = image
        self.patches = nn.Conv2d(num_channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.1 * torch.randn((size // patch) ** 2, width))
        block = {"nhead": 4, "dim_feedforward": expansion * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, size, size) to logits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": make_mlp,
    "CNN": ResidualCNN,
    "ViT": VisionTransformer,
    "narrow ViT": lambda: VisionTransformer(width=32, num_blocks=2),
}


def methods(batches: list[Any]) -> dict[str, dict[str, Any]]:
    """What is compared: name to arguments of `align`."""
    midpoint = {"objective": ob.Midpoint(CRITERION), "data": batches}
    random = {"objective": ob.RandomPoint(CRITERION), "data": batches}
    return {
        "weight matching": {"method": "weight-matching"},
        "activation matching": {"method": "activation-matching", "data": batches},
        "straight-through": {"method": "ste", **midpoint},
        "Sinkhorn L2": {"method": "sinkhorn"},
        "Sinkhorn midpoint": {"method": "sinkhorn", **midpoint},
        "Sinkhorn random point": {"method": "sinkhorn", **random},
        "weight matching, midpoint": {"method": "sinkhorn", **midpoint, "init": "weight-matching"},
        "weight matching, random point": {"method": "sinkhorn", **random, "init": "weight-matching"},
    }


def run_pair(trial: tuple[str, int]) -> list[dict[str, Any]]:
    """Train two networks and align the second to the first by every method."""
    network, pair = trial
    torch.set_num_threads(1)  # networks this small gain nothing from threads
    images, labels = digits("train")
    test_images, test_labels = digits("test")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    networks = []
    for seed in (2 * pair, 2 * pair + 1):
        torch.manual_seed(seed)
        schedule = {"epochs": 15, "lr": 2e-3} if "ViT" in network else {"epochs": 15}
        networks.append(train(NETWORKS[network](), images, labels, seed, **schedule))
    a, b = networks
    symmetry = ob.symmetry(a, images[:2])
    distance = ob.WeightDistance().bind(a)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            output = model(test_images)
        return {
            "loss": float(CRITERION(output, test_labels)),
            "accuracy": float((output.argmax(1) == test_labels).float().mean()),
        }

    records = []
    for name, arguments in {"as they are": None, **methods(batches)}.items():
        result = None if arguments is None else ob.align(b, to=a, symmetry=symmetry, **arguments)
        model = b if result is None else result.model
        path = ob.linear_path(a, model, evaluate, num_points=11, data=batches)
        records.append(
            {
                "network": network, "pair": pair, "method": name,
                "distance": float(distance(model.state_dict(), a.state_dict())),
                "barrier": path.barrier, "auc": path.auc, "midpoint_accuracy": path.metrics["accuracy"][5],
                "seconds": 0.0 if result is None else result.seconds,
            }
        )  # fmt: skip
    return records


def main() -> None:
    """Print a table a network, and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--first-pair", type=int, default=0, help="pairs that nothing was chosen on: 100 and up")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    options = parser.parse_args()
    pairs = range(options.first_pair, options.first_pair + options.pairs)
    trials = [(network, pair) for network in options.networks for pair in pairs]
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(trials))) as pool:
        records = [record for found in pool.map(run_pair, trials, chunksize=1) for record in found]
    for network in options.networks:
        print(f"\n{network}, mean of {options.pairs} pairs")
        print(f"{'':30}{'L2':>9}{'barrier':>9}{'AUC':>8}{'midpoint':>10}{'seconds':>9}")
        means: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(r["method"] for r in records):
            rows = [r for r in records if r["network"] == network and r["method"] == name]
            keys = ("distance", "barrier", "auc", "midpoint_accuracy", "seconds")
            m = means[name] = {key: statistics.mean(r[key] for r in rows) for key in keys}
            quality = f"{m['distance']:9.1f}{m['barrier']:9.3f}{m['auc']:8.3f}{m['midpoint_accuracy']:10.1%}"
            print(f"{name:30}{quality}{m['seconds']:9.1f}")
        naive = means.pop("as they are")["barrier"]
        halved = [name for name, m in means.items() if m["barrier"] < naive / 2]
        driven = {n: m["barrier"] for n, m in means.items() if "point" in n and "straight" not in n}
        best = min(driven, key=driven.__getitem__)
        print(f"barrier more than halved by {len(halved)} of {len(means)} methods")
        matched = means["weight matching"]["barrier"]
        print(f"best data-driven Sinkhorn: {best}, {driven[best]:.3f}; weight matching {matched:.3f}")
        verdict = means["Sinkhorn L2"]["distance"] <= means["weight matching"]["distance"]
        print(f"mean L2 cost of Sinkhorn with polish is {'not ' if verdict else ''}above weight matching's")
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
