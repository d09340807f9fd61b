"""Descents whose hardened result is to be better than activation matching, on three pairs of a plain CNN of six layers.

    python -m benchmarks.hard_descents --data DATA

aligns each pair of `benchmarks.plain_cnn` by activation matching, and then by each candidate from there, with the loss at
the repaired midpoint as the objective. A candidate has 750 passes of a batch of 250 images: a forward pass counts one, one
with its backward pass three. About ten seconds of one core each; half an hour in all on a machine that others use.

Judged is the permutation that comes out: the loss of the repaired midpoint on 2,000 images that neither network was trained
or aligned on, and its accuracy on 4,000 test images. Rates and masses were compared by that loss on
the first pair, some of them on it alone. Each trial is a record in results/hard-descents.jsonl, drawn in
results/hard-descents.md; trials that have a record are not made again.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onebasin as ob
from benchmarks.guided_descent import FrankWolfe, GuidedDescent
from benchmarks.plain_cnn import CRITERION, NUM_TRAINING, PAIRS, Pair, load_batches, make_pair, measure_accuracy
from benchmarks.records import Record, complete, tabulate, write_page
from onebasin.landscape.evaluation import mean_loss
from onebasin.matching.methods import Method
from onebasin.symmetries import Permutation

GROUPS = 5


class Stage(NamedTuple):
    """A method, and the groups that it decides."""

    method: Method
    groups: int | None = None


def soft(steps: int, **options: Any) -> Stage:
    """The descent of the paper, from logits at the identity."""
    return Stage(ob.Sinkhorn(steps=steps, patience=steps, **options))


def sharp(steps: int, lr: float = 0.4, mass: float = 0.99, **options: Any) -> Stage:
    """The same from plans that hold nearly all their mass on the start."""
    return soft(steps, start="scaled", mass=mass, lr=lr, **options)


def guided(**options: Any) -> Stage:
    """A sharp descent that is kept near permutations."""
    return Stage(GuidedDescent(**{"steps": 150, "lr": 0.4, **options}))


def exchange(candidates: float) -> Stage:
    """One round of exchanges, so many tried per unit."""
    return Stage(ob.Exchange(rounds=1, candidates=candidates))


CANDIDATES: dict[str, list[Stage]] = {
    "nothing": [],
    "soft start (the paper)": [soft(165)],
    "sharp start, mass 0.99, rate 0.2": [sharp(165, 0.2)],
    "sharp start, mass 0.99, rate 0.4": [sharp(165)],
    "sharp start, mass 0.999, rate 0.4": [sharp(165, mass=0.999)],
    "straight-through estimator": [Stage(ob.StraightThrough(steps=150, patience=150))],
    "hard forward pass, gradient of the plan": [guided(is_hard=True)],
    "penalty on the distance to the start": [guided(distance=1.0)],
    "trust region: logits at most 6 from the start": [guided(radius=6.0)],
    "five descents, each from the best permutation so far": [sharp(33)] * 5,
    "falling tau, mass 0.9, 1 to 0.2": [sharp(165, mass=0.9, final_tau=0.2)],
    "penalty on the entropy": [guided(entropy=0.3)],
    "Gumbel noise on the logits": [guided(noise=1.0)],
    "Frank-Wolfe": [Stage(FrankWolfe())],
    "Frank-Wolfe, reward for staying": [Stage(FrankWolfe(rewards=(0.0, 0.125, 0.25, 0.5, 0.75)))],
    "groups in turn": [Stage(sharp(33).method, number) for number in range(GROUPS)],
    "exchanges": [exchange(2.0)],
    "sharp, then exchanges": [sharp(82, mass=0.999), exchange(0.5)],
    "soft, then sharp, then exchanges": [soft(40), sharp(60, mass=0.999), exchange(0.4)],
}
"""Those that take steps on logits and say nothing else have a mass of 0.99 and a rate of 0.4."""
ON_FIRST_PAIR: dict[str, list[Stage]] = {
    "sharp start, mass 0.99, rate 0.05": [sharp(165, 0.05)],
    "sharp start, mass 0.99, rate 0.8": [sharp(165, 0.8)],
    "sharp start, mass 0.9, rate 0.4": [sharp(165, mass=0.9)],
    "sharp start, mass 0.999, rate 0.8": [sharp(165, 0.8, 0.999)],
    "straight-through estimator, rate 0.03": [Stage(ob.StraightThrough(steps=120, patience=120, lr=0.03))],
    "falling tau, soft start, 1 to 0.1": [soft(165, final_tau=0.1)],
    "Gumbel noise on the logits, mass 0.999": [guided(noise=1.0, mass=0.999)],
}
"""Settings that were tried on the first pair alone."""


class _Counted:
    """The loss, counting passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.passes += 3 if torch.is_grad_enabled() else 1
        return CRITERION(output, target)


@functools.cache
def _match_activations(number: int) -> Permutation:
    pair = make_pair(number)
    found = ob.align(pair.b, to=pair.a, symmetry=pair.symmetry, method="activation-matching", data=pair.batches)
    return found.permutation


def measure(config: Record) -> Record:
    """Run a candidate on a pair, and judge what it hardened to."""
    pair, loss = make_pair(config["pair"]), _Counted()
    found, softest = _match_activations(config["pair"]), []
    begin = time.process_time()
    for stage in (CANDIDATES | ON_FIRST_PAIR)[config["candidate"]]:
        result = _align(pair, stage, found, loss)
        found = result.permutation
        softest += [entry["soft"] for entry in result.history if "soft" in entry]
    seconds = time.process_time() - begin
    middle = pair.average(found)
    held_out = load_batches(NUM_TRAINING, NUM_TRAINING + 2000)
    record = {"loss": mean_loss(CRITERION, held_out)(middle)["loss"], "accuracy": measure_accuracy(middle)}
    return {**record, "passes": loss.passes, "seconds": seconds, **({"soft": min(softest)} if softest else {})}


def _align(pair: Pair, stage: Stage, start: Permutation, loss: _Counted) -> ob.Alignment[Any]:
    groups = None if stage.groups is None else [list(pair.symmetry.groups)[stage.groups]]
    objective = ob.Midpoint(loss, repaired=True)
    return ob.align(
        pair.b, to=pair.a, symmetry=pair.symmetry, method=stage.method, objective=objective, data=pair.batches,
        init=start, groups=groups,
    )  # fmt: skip


def draw(records: Sequence[Record]) -> list[str]:
    """The lines of the page: a row per candidate, best first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["config"]["candidate"], []).append(record["result"])

    def average(name: str, key: str) -> float:
        return statistics.mean(result[key] for result in found[name])

    rows = []
    ordered = sorted(found, key=lambda name: average(name, "loss"))
    for name in sorted(ordered, key=lambda name: name in ON_FIRST_PAIR):
        each = [", ".join(f"{r[key]:{form}}" for r in found[name]) for key, form in (("loss", ".3f"), ("accuracy", ".1%"))]
        lowest = ", ".join(f"{r['soft']:.3f}" for r in found[name] if "soft" in r)
        means = [f"{average(name, 'loss'):.3f}", f"{average(name, 'accuracy'):.1%}"]
        cells = [name, means[0], each[0], means[1], each[1], lowest, f"{average(name, 'passes'):.0f}"]
        rows.append([*cells, f"{average(name, 'seconds'):.0f}"])
    head = ["from activation matching", "loss", "each pair", "test accuracy", "each pair", "lowest soft loss"]
    best, nothing = rows[0], next(row for row in rows if row[0] == "nothing")
    return [
        "# Descents whose hardened result improves", "",
        f"**{best[0][0].upper()}{best[0][1:]} ends lowest: {best[1]} and {best[3]}, activation matching {nothing[1]} and "
        f"{nothing[3]}.**", "",
        "`python -m benchmarks.hard_descents`; plain CNNs of six layers on small MNIST images. Loss of the repaired "
        "midpoint on 2,000 images that no network has seen, and its accuracy on 4,000 test images. The lowest soft loss is "
        "that of a training batch at a softly permuted midpoint. A forward pass of a batch counts one, "
        "one with its backward pass three. Rates and masses were compared on the first pair, the "
        "rows at the end on it alone.", "",
        *tabulate([*head, "passes", "seconds"], rows),
    ]  # fmt: skip


def main() -> None:
    """Measure what has no record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST/raw (or set ONEBASIN_DATA)")
    parser.add_argument("--out", type=Path, default=Path("results/hard-descents.jsonl"), help="the records")
    options = parser.parse_args()
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    configs = [{"pair": pair, "candidate": name} for pair in PAIRS for name in CANDIDATES]
    configs += [{"pair": PAIRS[0], "candidate": name} for name in ON_FIRST_PAIR]
    records = complete(options.out, configs, measure)
    write_page(options.out.with_suffix(".md"), draw(records), records)


if __name__ == "__main__":
    main()
