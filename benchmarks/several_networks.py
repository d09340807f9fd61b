"""Three ResNet-20 brought together without data: one reference, the mean of the others, a common frame, one descent.

    python -m benchmarks.several_networks --data DATA

merges the three stored networks (experiments/stored) in each order, by each matching and each `reference=` of `ob.merge`,
and in two further ways. Statistics of the merged network are estimated on the first 2,000 training images, augmented;
accuracy is that on 5,000 test images. *Agreement* is what a common frame maximises: the inner products of the weights of
all pairs of networks, in units of the value before any of them is moved. Each trial is a record in
results/several-networks.jsonl, drawn in results/several-networks.md. A quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.deep_matching import BATCH, NUM_TRAIN, evaluate
from benchmarks.records import Record, complete, tabulate, write_page
from experiments.anchor_networks import RECIPES, augment, load_images, trained_networks
from onebasin.matching.common_frame import _FrankWolfe
from onebasin.matching.methods.sinkhorn import make_optimizer
from onebasin.relaxation.hardening import harden, joint_weights
from onebasin.symmetries import Permutation, Symmetry

ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1))
STEPS = 200
Move = Callable[[Sequence[nn.Module], Symmetry], list[Permutation]]


def by_merging(reference: str, **options: Any) -> Move:
    """What `ob.merge` does to each network."""

    def move(models: Sequence[nn.Module], symmetry: Symmetry) -> list[Permutation]:
        found: list[Any] = []
        ob.merge(models, symmetry=symmetry, reference=reference, on_aligned=found.extend, **options)  # type: ignore[arg-type]
        return found

    return move


def by_frank_wolfe(models: Sequence[nn.Module], symmetry: Symmetry, max_iters: int = 200) -> list[Permutation]:
    """The search for a common frame, but all networks except the first begin as averages of their units."""
    search = _FrankWolfe(parameters(models), symmetry, [1 / len(models)] * len(models))
    still = search.plans_of(symmetry.identity())
    equal = {name: torch.full_like(plan, 1 / plan.shape[-1]) for name, plan in still.items()}
    plans = [still] + [equal] * (len(models) - 1)
    value = search.value(plans)
    for _ in range(max_iters):
        plans, better = search.move_towards(plans, [still, *search.find_vertices(plans)[1:]])
        if better - value <= 1e-6 * abs(value):
            break
        value = better
    return [harden(symmetry, joint_weights(symmetry, each)) for each in plans]


def by_one_descent(models: Sequence[nn.Module], symmetry: Symmetry) -> list[Permutation]:
    """Sinkhorn on the L2 distances of all pairs: the plans of all networks but the first move in the same steps."""
    first, *others = models
    search = _FrankWolfe(parameters(models), symmetry, [1 / len(models)] * len(models))
    nets = [ob.RebasinNet(model, symmetry) for model in others]
    optimizers = [make_optimizer(net, "row-adam") for net in nets]
    still = symmetry.identity()
    best, highest = [still] * len(models), -math.inf
    for step in range(1, STEPS + 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum_distances([dict(first.named_parameters()), *(net() for net in nets)]).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 5 == 0:
            for found in zip(*(net.candidates() for net in nets), strict=False):
                value = search.value([search.plans_of(each) for each in (still, *found)])
                best, highest = ([still, *found], value) if value > highest else (best, highest)
    return best


def sum_distances(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The sum of the squared distances of all pairs, over the parameters of the first."""
    terms = []
    for key in states[0]:
        values = torch.stack([state[key] for state in states])
        terms.append(len(values) * values.square().sum() - values.sum(0).square().sum())
    return torch.stack(terms).sum()


def parameters(models: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Those of each network."""
    return [{key: value.detach() for key, value in model.named_parameters()} for model in models]


MATCHINGS: dict[str, dict[str, Any]] = {
    "weight matching": {"method": "weight-matching"},
    "Sinkhorn L2": {"method": "sinkhorn"},
    "Sinkhorn L2, not polished": {"method": "sinkhorn", "polish": False},
}
REFERENCES = {"first": "the first", "mean": "the mean of the others", "common": "a common frame"}
WAYS: dict[str, Move] = {
    f"{matching}, to {label}": by_merging(reference, **options)
    for matching, options in MATCHINGS.items()
    for reference, label in REFERENCES.items()
}
WAYS |= {"Frank-Wolfe, from equal plans": by_frank_wolfe, "Sinkhorn L2, all in one descent": by_one_descent}


@functools.cache
def load_networks() -> tuple[list[nn.Module], Symmetry, list[Tensor]]:
    """The stored networks, their symmetry, and the images that statistics are estimated on."""
    networks = trained_networks(RECIPES["resnet20-long"], [0, 1, 2], "cpu", run=2)
    images = load_images("train", "cpu")[0][:NUM_TRAIN]
    return networks, ob.symmetry(networks[0], images[:2]), list(images.split(BATCH))


def measure(config: Record) -> Record:
    """Move the networks by one way, and measure their mean."""
    networks, symmetry, batches = load_networks()
    models = [networks[number] for number in config["seeds"]]
    begin = time.process_time()
    moved = [copy.deepcopy(model) for model in models]
    for model, permutation in zip(moved, WAYS[config["way"]](models, symmetry), strict=True):
        model.load_state_dict(permutation.apply(model))
    seconds = time.process_time() - begin
    mean = copy.deepcopy(models[0])
    mean.load_state_dict(ob.interpolate(moved, [1 / len(moved)] * len(moved)))
    torch.manual_seed(0)
    mean.load_state_dict(ob.reset_batch_norm(mean, [augment(batch) for batch in batches]))
    shares = [1 / len(models)] * len(models)
    identity = [_FrankWolfe(parameters(each), symmetry, shares) for each in (models, moved)]
    before, after = (search.value([search.plans_of(symmetry.identity())] * len(models)) for search in identity)
    return {"agreement": after / before, "accuracy": evaluate(mean)["accuracy"], "seconds": seconds}


def draw(records: Sequence[Record]) -> list[str]:
    """The lines of the page: a row per way, means over the orders."""
    rows, means = [], {}
    for way in WAYS:
        found = [record["result"] for record in records if record["config"]["way"] == way]
        each = ", ".join(f"{100 * result['accuracy']:.1f}" for result in found)
        mean = {key: statistics.mean(result[key] for result in found) for key in found[0]}
        means[way] = mean["accuracy"]
        rows.append([way, f"{100 * mean['accuracy']:.1f}", each, f"{mean['agreement']:.3f}", f"{mean['seconds']:.0f}"])
    best = max(means, key=lambda way: means[way])
    return [
        "# Three ResNet-20 brought together without data", "",
        f"**The highest accuracy has \"{best}\": {means[best]:.1%}.**", "",
        "`python -m benchmarks.several_networks`; three ResNet-20 of 250 epochs in three orders, no data for the matching. "
        "Accuracy of their mean on 5,000 test images, statistics estimated on 2,000 augmented training images. Agreement is "
        "the sum of the inner products of the weights of all pairs, over its value before. Seconds of one core.", "",
        *tabulate(["how the networks are moved", "accuracy", "each order", "agreement", "seconds"], rows),
    ]  # fmt: skip


def main() -> None:
    """Measure what has no record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with cifar-10-batches-py (or set ONEBASIN_DATA)")
    parser.add_argument("--out", type=Path, default=Path("results/several-networks.jsonl"), help="the records")
    options = parser.parse_args()
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    configs = [{"way": way, "seeds": list(order)} for way in WAYS for order in ORDERS]
    records = complete(options.out, configs, measure)
    write_page(options.out.with_suffix(".md"), draw(records), records)


if __name__ == "__main__":
    main()
