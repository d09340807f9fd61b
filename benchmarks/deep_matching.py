"""Permutations of deep networks: methods without data compared, and which activations to compare.

    python -m benchmarks.deep_matching --data DATA [--only NAME] [--draw]

aligns the three stored ResNet-20 (experiments/stored) by each method and measures the midpoint on the test images of
CIFAR-10. All methods see the same: statistics of the midpoint are estimated on the first 2,000 training images, augmented,
and activations are compared on these images as they are. Records are added to deep-matching.jsonl, and deep-matching.md is
drawn from them; a trial that has a record is not run again. A quarter of an hour on one core.
"""

import argparse
import copy
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.measuring import find_commit
from experiments.anchor_networks import RECIPES, augment, load_images, trained_networks
from experiments.frame import read_records
from onebasin.matching.common_frame import _FrankWolfe, find_common_frame
from onebasin.relaxation.hardening import harden, joint_weights

CRITERION = nn.functional.cross_entropy
SEEDS = ((0, 1), (1, 2), (2, 0))
NUM_TRAIN, NUM_TEST, BATCH = 2000, 5000, 100
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pair:
    """Two networks, one to be permuted, what methods with data may look at, and the mean test loss of the two."""

    target: nn.Module
    source: nn.Module
    symmetry: ob.Symmetry
    data: Batches
    end_loss: float

    def align(self, **arguments: Any) -> ob.Permutation:
        """What `ob.align` finds."""
        given: dict[str, Any] = {"symmetry": self.symmetry, **arguments}
        return ob.align(self.source, to=self.target, **given).permutation

    def parameters(self) -> list[dict[str, Tensor]]:
        """Those of both networks."""
        return [{key: value.detach() for key, value in m.named_parameters()} for m in (self.target, self.source)]


class ConvexToConcave(ob.Objective):
    """The L2 distance of a soft permutation, its own squared norm counted with a weight that falls from 1 to -1.

    All hard permutations of a network have the same norm, so the weight changes nothing for them. At 1 this is the L2
    distance, which is convex in a single plan, at 0 the inner product; at -1 it is concave.
    """

    uses_data = False

    def __init__(self, num_steps: int):
        self.num_steps, self.step = num_steps, 0

    def __call__(self, params: Mapping[str, Any], target: Mapping[str, Any], batch: Any = None) -> Tensor:
        """The relaxation of this step."""
        weight = 1 - 2 * min(self.step / self.num_steps, 1)
        self.step += 1
        return self._sum(params, target, weight)

    def judge(self, params: Mapping[str, Any], target: Mapping[str, Any], batch: Any = None) -> Tensor:
        """The L2 distance."""
        return self._sum(params, target, 1)

    def bind(self, model: Any) -> ob.Objective:
        """Count parameters alone."""
        self.keys = [key for key, _ in model.named_parameters()]
        return self

    def _sum(self, params: Mapping[str, Any], target: Mapping[str, Any], weight: float) -> Tensor:
        terms = [
            weight * params[key].square().sum() - 2 * (params[key] * target[key]).sum() + target[key].square().sum()
            for key in self.keys
        ]
        return torch.stack(terms).sum()


def search_by_frank_wolfe(pair: Pair, max_iters: int = 200) -> ob.Permutation:
    """Frank-Wolfe on the inner product of the weights, from plans whose entries are all equal."""
    search = _FrankWolfe(pair.parameters(), pair.symmetry, [0.5, 0.5])
    still = search.plans_of(pair.symmetry.identity())  # of the target
    plans = {name: torch.full_like(plan, 1 / plan.shape[-1]) for name, plan in still.items()}
    value = search.value([still, plans])
    for _ in range(max_iters):
        vertex = search.find_vertices([still, plans])[1]
        (_, plans), better = search.move_towards([still, plans], [still, vertex])
        if better - value <= 1e-6 * abs(value):
            break
        value = better
    return harden(pair.symmetry, joint_weights(pair.symmetry, plans))


def find_frame(pair: Pair) -> ob.Permutation:
    """The common frame of two networks, as `ob.merge` has it: Frank-Wolfe from the identity, on the plans of both."""
    starts = [pair.symmetry.identity()] * 2
    return find_common_frame(pair.parameters(), pair.symmetry, starts, [0.5, 0.5], lambda *_: None)[1]


def match_noise(pair: Pair) -> ob.Permutation:
    """Activation matching on random pixels."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(BATCH, 3, 32, 32, generator=generator) for _ in range(NUM_TRAIN // BATCH)]
    return pair.align(method="activation-matching", data=noise)


def match_at(*names: str) -> Callable[[Pair], ob.Permutation]:
    """Activation matching that looks at the modules of these names alone; a name is the end of a path."""

    def match(pair: Pair) -> ob.Permutation:
        sites = {
            group: tuple(site for site in found if site.module.endswith(names))
            for group, found in pair.symmetry.sites.items()
        }
        return pair.align(method="activation-matching", data=pair.data, symmetry=replace(pair.symmetry, sites=sites))

    return match


def exchange(pair: Pair) -> ob.Permutation:
    """A round of exchanges on the repaired midpoint, from activation matching."""
    return pair.align(
        method=ob.Exchange(rounds=1, candidates=0.5),
        objective=ob.Midpoint(CRITERION, repaired=True),
        data=pair.data,
        init="activation-matching",
    )


WITHOUT_DATA: dict[str, Callable[[Pair], ob.Permutation]] = {
    "as they are": lambda pair: pair.symmetry.identity(),
    "weight matching": lambda pair: pair.align(method="weight-matching"),
    "weight matching, 20 restarts": lambda pair: pair.align(method="weight-matching", restarts=20),
    "Sinkhorn L2, not polished": lambda pair: pair.align(method="sinkhorn", polish=False),
    "Sinkhorn L2 (the default)": lambda pair: pair.align(method="sinkhorn"),
    "inner product, not polished": lambda pair: pair.align(
        method="sinkhorn", objective=ob.WeightDistance("inner"), polish=False
    ),
    "inner product": lambda pair: pair.align(method="sinkhorn", objective=ob.WeightDistance("inner")),
    "convex to concave, 200 steps": lambda pair: pair.align(
        method="sinkhorn", objective=ConvexToConcave(200), steps=200, patience=200
    ),
    "Sinkhorn L2, 200 steps": lambda pair: pair.align(method="sinkhorn", steps=200, patience=200),
    "Sinkhorn L2, 200 steps, not polished": lambda pair: pair.align(
        method="sinkhorn", steps=200, patience=200, polish=False
    ),
    "convex to concave, 200 steps, not polished": lambda pair: pair.align(
        method="sinkhorn", objective=ConvexToConcave(200), steps=200, patience=200, polish=False
    ),
    "Frank-Wolfe from equal plans": search_by_frank_wolfe,
    "Frank-Wolfe from the identity": find_frame,
    "weight matching, then Sinkhorn L2": lambda pair: pair.align(method="sinkhorn", init="weight-matching"),
    "activation matching on noise": match_noise,
    "activation matching on noise, then Sinkhorn L2": lambda pair: pair.align(method="sinkhorn", init=match_noise(pair)),
    "Sinkhorn L2, tau from 1 to 0.1": lambda pair: pair.align(method="sinkhorn", final_tau=0.1, patience=100),
    "Sinkhorn L2, 4 restarts": lambda pair: pair.align(method="sinkhorn", restarts=4),
}
WITH_DATA: dict[str, Callable[[Pair], ob.Permutation]] = {
    "every module (the default)": lambda pair: pair.align(method="activation-matching", data=pair.data),
    "norms, before the ReLU or the sum": match_at("stem.1", "norm1", "norm2", "shortcut.1"),
    "after the ReLU": match_at("stem.2", "relu", "out"),
    "after the ReLU, of a stage its last output": match_at("relu", "blocks.2.out", "blocks.5.out", "blocks.8.out"),
    "every module, then Sinkhorn L2": lambda pair: pair.align(
        method="sinkhorn", init=pair.align(method="activation-matching", data=pair.data)
    ),
    "every module, then a round of exchanges": exchange,
}
TITLES = {"Without data": WITHOUT_DATA, "Activation matching": WITH_DATA}


def make_pairs() -> list[Pair]:
    """The stored networks, two at a time."""
    networks = trained_networks(RECIPES["resnet20-long"], [0, 1, 2], "cpu", run=2)
    images, labels = (values[:NUM_TRAIN] for values in load_images("train", "cpu"))
    symmetry = ob.symmetry(networks[0], images[:2])
    data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    losses = [evaluate(network)["loss"] for network in networks]
    return [Pair(networks[i], networks[j], symmetry, data, (losses[i] + losses[j]) / 2) for i, j in SEEDS]


def measure(pair: Pair, permutation: ob.Permutation) -> dict[str, float]:
    """The distance that is left, and the midpoint on test images with statistics estimated again."""
    moved = permutation.apply(pair.source)
    middle = copy.deepcopy(pair.target)
    middle.load_state_dict(ob.interpolate([pair.target, moved], [0.5, 0.5]))
    torch.manual_seed(0)
    middle.load_state_dict(ob.reset_batch_norm(middle, [augment(images) for images, _ in pair.data]))
    found = evaluate(middle)
    distance = sum(float((moved[key] - value).square().sum()) for key, value in pair.parameters()[0].items())
    return {"distance": distance, "accuracy": found["accuracy"], "excess loss": found["loss"] - pair.end_loss}


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Accuracy and loss on test images."""
    images, labels = _load_test_images()
    outputs = torch.cat([model(batch) for batch in images.split(BATCH)])
    return {"accuracy": float((outputs.argmax(1) == labels).float().mean()), "loss": float(CRITERION(outputs, labels))}


@functools.cache
def _load_test_images() -> tuple[Tensor, Tensor]:
    images, labels = load_images("test", "cpu")
    return images[:NUM_TEST], labels[:NUM_TEST]


def run(pairs: Sequence[Pair], names: Sequence[str], file: Path) -> None:
    """Add the records that are missing."""
    known = {(record["method"], tuple(record["seeds"])) for record in read_records(file)}
    methods = {**WITHOUT_DATA, **WITH_DATA}
    for name in names:
        for seeds, pair in zip(SEEDS, pairs, strict=True):
            if (name, seeds) in known:
                continue
            begin = time.process_time()
            found = methods[name](pair)
            seconds = time.process_time() - begin
            record = {"method": name, "seeds": seeds, **measure(pair, found), "seconds": round(seconds, 2)}
            print(record, flush=True)
            with file.open("a") as records:
                records.write(json.dumps({**record, "commit": find_commit(), "torch": torch.__version__}) + "\n")


def write_tables(records: Sequence[dict[str, Any]]) -> str:
    """The page of results: a row per method, means over the pairs and each pair's accuracy."""
    lines = ["# Permutations of three ResNet-20 (250 epochs) compared", "", *_write_verdict(records), ""]
    for title, methods in TITLES.items():
        lines += [
            f"## {title}", "",
            "| method | midpoint accuracy | each pair | excess loss | L2 distance | seconds |", "|---" * 6 + "|",
        ]  # fmt: skip
        for name in methods:
            if found := [record for record in records if record["method"] == name]:
                lines.append(_write_row(name, found))
        lines.append("")
    commits = ", ".join(sorted({record["commit"] for record in records}))
    versions = ", ".join(sorted({record["torch"] for record in records}))
    lines.append(f"{len(records)} trials, `python -m benchmarks.deep_matching`; commit {commits}; torch {versions}.")
    return "\n".join(lines) + "\n"


def _write_verdict(records: Sequence[dict[str, Any]]) -> list[str]:
    """The best row of each table, and what the columns are."""
    verdict = []
    for title, methods in TITLES.items():
        means = {
            name: statistics.mean(record["accuracy"] for record in records if record["method"] == name)
            for name in methods
            if any(record["method"] == name for record in records)
        }
        if means:
            best = max(means, key=lambda name: means[name])
            verdict.append(f"- {title}: the highest accuracy has {best!r}, {means[best]:.1%}.")
    return [
        *verdict,
        "",
        "Accuracy at the midpoint on 5,000 test images, statistics estimated on 2,000 augmented training images; the test",
        "loss there above the mean of the ends; the squared distance of the parameters; seconds of one core. Means over",
        "three pairs.",
    ]


def _write_row(name: str, found: Sequence[dict[str, Any]]) -> str:
    mean = {key: statistics.mean(record[key] for record in found) for key in _COLUMNS}
    each = ", ".join(f"{100 * record['accuracy']:.1f}" for record in found)
    cells = [name, f"{100 * mean['accuracy']:.1f}", each, f"{mean['excess loss']:.2f}", f"{mean['distance']:.0f}"]
    cells.append(f"{mean['seconds']:.1f}")
    return f"| {' | '.join(cells)} |"


_COLUMNS = ("accuracy", "excess loss", "distance", "seconds")


def main() -> None:
    """Align, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with cifar-10-batches-py (or set ONEBASIN_DATA)")
    parser.add_argument("--only", action="append", choices=[*WITHOUT_DATA, *WITH_DATA], metavar="NAME", help="a method")
    parser.add_argument("--draw", action="store_true", help="run nothing: draw from the records there are")
    parser.add_argument("--out", type=Path, default=Path("results/deep-matching"), help="without its suffix")
    options = parser.parse_args()
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    file = options.out.with_suffix(".jsonl")
    if not options.draw:
        run(make_pairs(), options.only or [*WITHOUT_DATA, *WITH_DATA], file)
    options.out.with_suffix(".md").write_text(page := write_tables(read_records(file)))
    print(page)


if __name__ == "__main__":
    main()
