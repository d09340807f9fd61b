"""Does repair help what `merge` makes by default? ``python -m benchmarks.repaired_merges [--pairs 4]``.

Pairs of an MLP, of a CNN with batch norms, of one of six layers without norms and of two small vision transformers, trained
apart on the embedded digits, are merged on the training data: by activation matching (the default without an objective), by
the default on the loss of the midpoint as it is, and on that of the repaired midpoint, as `merge` does by itself. Prints the
test loss and accuracy of the merge as it is, with ``repair="repair"``, and by default, which keeps the repair unless the
objective has a loss that it does not lower; ten minutes on one core.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import onebasin as ob
from benchmarks.digits import CRITERION, NETWORKS
from benchmarks.measuring import find_commit
from benchmarks.plain_cnn import make_cnn
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
    """Test loss and accuracy of the merge as it is, repaired, and by default."""
    images, _ = digits("train")
    aligned: list[nn.Module] = []
    done: list[Any] = []
    symmetry = ob.symmetry(networks[0], images[:2])
    evaluate = mean_loss(CRITERION, [digits("test")])
    by_default = ob.merge(
        networks,
        symmetry=symmetry,
        on_result=lambda _, found: aligned.append(found.model),
        on_repair=done.append,
        **way,
    )
    plain = copy.deepcopy(by_default)
    plain.load_state_dict(ob.interpolate([networks[0], *aligned], [0.5, 0.5]))
    repaired = copy.deepcopy(plain)
    repaired.load_state_dict(ob.repair(plain, [networks[0], *aligned], way["data"], symmetry).state)
    return [{**evaluate(model), "kept": float(done[0] is not None)} for model in (plain, repaired, by_default)]


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
        "the default on the midpoint as it is": {"data": batches, "objective": ob.Midpoint(CRITERION, repaired=False)},
        "the default on the midpoint": {"data": batches, "objective": ob.Midpoint(CRITERION)},
    }
    print("| network | aligned by | loss | repaired | by default | accuracy | repaired | by default | kept in |")
    print("|---" * 9 + "|")
    for name, make in {**NETWORKS, "CNN without norms": make_cnn}.items():
        pairs = [train_pair(make, pair, *((15, 2e-3) if "ViT" in name else (15, 5e-3))) for pair in range(options.pairs)]
        for way, arguments in ways.items():
            found = [measure(pair, arguments) for pair in pairs]
            losses, accuracies = (
                [statistics.mean(each[i][key] for each in found) for i in range(3)] for key in ("loss", "accuracy")
            )
            kept = sum(each[0]["kept"] for each in found)
            cells = [*(f"{loss:.3f}" for loss in losses), *(f"{share:.1%}" for share in accuracies)]
            print(f"| {name} | {way} | {' | '.join(cells)} | {kept:.0f} of {len(found)} |", flush=True)
    print(f"\n{options.pairs} pairs of each network, torch {torch.__version__}, commit {find_commit()}.")


if __name__ == "__main__":
    main()
