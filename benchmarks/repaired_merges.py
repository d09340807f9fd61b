"""Does repair help what `merge` makes by default? ``python -m benchmarks.repaired_merges [--pairs 4]``.

Pairs of an MLP, of a CNN with batch norms and of two small vision transformers, trained apart on the embedded digits, are
merged on the training data: by activation matching (the default without an objective) and by the default on the loss of the
midpoint. Prints the test loss and accuracy of the merge as it is, and with ``repair="repair"``; ten minutes on one core.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import onebasin as ob
from benchmarks.digits import CRITERION, NETWORKS
from benchmarks.measuring import find_commit
from onebasin.cli.digits_demo import train
from onebasin.datasets import digits
from onebasin.landscape.evaluation import mean_loss


def train_pair(make: Callable[[], nn.Module], pair: int, epochs: int, rate: float) -> list[nn.Module]:
    """Two networks that differ in their start and in the order of their data."""
    images, labels = digits("train")
    networks = []
    for seed in (2 * pair, 2 * pair + 1):
        torch.manual_seed(seed)
        networks.append(train(make(), images, labels, seed, epochs, rate))
    return networks


def measure(networks: list[nn.Module], way: dict[str, Any]) -> list[dict[str, float]]:
    """Test loss and accuracy of the merge, as it is and repaired."""
    images, _ = digits("train")
    aligned: list[nn.Module] = []
    symmetry = ob.symmetry(networks[0], images[:2])
    plain = ob.merge(networks, symmetry=symmetry, repair=None, on_result=lambda _, found: aligned.append(found.model), **way)
    evaluate = mean_loss(CRITERION, [digits("test")])
    before = dict(evaluate(plain))
    plain.load_state_dict(ob.repair(plain, [networks[0], *aligned], way["data"], symmetry).state)
    return [before, dict(evaluate(plain))]


def main() -> None:
    """Train, merge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of each network (default 4)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = digits("train")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    ways: dict[str, dict[str, Any]] = {
        "activation matching": {"data": batches},
        "the default on the midpoint": {"data": batches, "objective": ob.Midpoint(CRITERION)},
    }
    print("| network | aligned by | loss | repaired | lower in | accuracy | repaired |\n" + "|---" * 7 + "|")
    for name, make in NETWORKS.items():
        pairs = [train_pair(make, pair, *((15, 2e-3) if "ViT" in name else (15, 5e-3))) for pair in range(options.pairs)]
        for way, arguments in ways.items():
            found = [measure(pair, arguments) for pair in pairs]
            lower = sum(after["loss"] < before["loss"] for before, after in found)
            losses, accuracies = (
                [statistics.mean(each[i][key] for each in found) for i in (0, 1)] for key in ("loss", "accuracy")
            )
            print(
                f"| {name} | {way} | {losses[0]:.3f} | {losses[1]:.3f} | {lower} of {len(found)} "
                f"| {accuracies[0]:.1%} | {accuracies[1]:.1%} |",
                flush=True,
            )
    print(f"\n{options.pairs} pairs of each network, torch {torch.__version__}, commit {find_commit()}.")


if __name__ == "__main__":
    main()
