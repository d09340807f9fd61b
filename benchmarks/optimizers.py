"""The descent by rows and by entries, on networks trained apart: ``python -m benchmarks.optimizers --data DATA --out FILE``.

Each pair is aligned by every setting, with and without the polish, otherwise by default. Compared pair by pair with Adam by
entries: the hard L2 distance, the barrier on test data, steps, and seconds of the processor (one thread). Statistics of
batch norms are estimated again along the line. Pairs with an even number are there to choose settings on, the others to
judge by. With ``--midpoint`` the objective is the loss at the midpoint, on training data; with ``--read`` tables are printed
from the records that are there.

Last come the planted copies of Table 1 (``experiments.table1``): how many are found by the descent, which is not told that
they are copies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from benchmarks.digits import VisionTransformer
from benchmarks.measuring import Record, append, check_files, describe_machine
from benchmarks.pairs import PAIRS
from experiments import anchor_networks as anchors
from experiments.table1 import DEPTHS, INITS, make_networks
from experiments.tasks import TASKS, load, trained_networks
from onebasin.cli.digits_demo import train
from onebasin.datasets import digits
from onebasin.landscape.evaluation import mean_loss

CRITERION = nn.functional.cross_entropy
NUM_MEASURED = 1000  # images of CIFAR-10 that ResNet-20 is judged by, and training images for the statistics of its norms
Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Trial:
    """Two networks, and what the line between them is judged by: a loss on test data, and batches for statistics."""

    target: nn.Module
    source: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    test: Batches
    batches: Batches
    num_points: int = 11


@dataclass(frozen=True)
class Family:
    """Pairs of one kind: how those with certain numbers are made, and how many there are."""

    make: Callable[[list[int]], Iterator[Trial]]
    num_pairs: int


def _take_from_table(name: str, numbers: list[int]) -> Iterator[Trial]:
    """Networks of Table 2: pair n has the seeds 2 n and 2 n + 1."""
    task = TASKS[name]
    stack = trained_networks(task, [seed for n in numbers for seed in (2 * n, 2 * n + 1)], "cpu")
    batches, test = (load(task, split).batches(1000) for split in ("train", "test"))
    for place in range(len(numbers)):
        target, source = task.make_model(), task.make_model()
        for model, number in ((target, 2 * place), (source, 2 * place + 1)):
            model.load_state_dict({key: value[number] for key, value in stack.items()})
        yield Trial(target.eval(), source.eval(), task.loss, test[:5], batches)


def _train_on_digits(make: Callable[[], nn.Module], epochs: int, lr: float, numbers: list[int]) -> Iterator[Trial]:
    (images, labels), test = digits("train"), digits("test")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    for number in numbers:
        networks = []
        for seed in (2 * number, 2 * number + 1):
            torch.manual_seed(seed)
            networks.append(train(make(), images, labels, seed, epochs, lr))
        yield Trial(networks[0], networks[1], CRITERION, [test], batches)


def _load_stored(numbers: list[int]) -> Iterator[Trial]:
    """The three ResNet-20 of the repository."""
    networks = anchors.trained_networks(anchors.RECIPES["resnet20-long"], (0, 1, 2), "cpu", run=2)
    batches, test = (
        list(zip(images[:NUM_MEASURED].split(200), labels[:NUM_MEASURED].split(200), strict=True))
        for images, labels in (anchors.load_images(split, "cpu") for split in ("train", "test"))
    )
    for number in numbers:
        yield Trial(networks[number], networks[(number + 1) % 3], CRITERION, test, batches, num_points=3)


def _digits_of(name: str) -> Family:
    recipe = PAIRS[name]
    return Family(lambda numbers: _train_on_digits(recipe.make, recipe.epochs, recipe.lr, numbers), 20)


FAMILIES = {
    "Pol1": Family(lambda numbers: _take_from_table("Pol1", numbers), 50),
    "Pol3": Family(lambda numbers: _take_from_table("Pol3", numbers), 50),
    "MNIST": Family(lambda numbers: _take_from_table("MNIST", numbers), 20),
    "CIFAR-10": Family(lambda numbers: _take_from_table("CIFAR-10", numbers), 10),
    "MLP 2 x 512, digits": _digits_of("MLP 2 x 512, digits"),
    "residual CNN, digits": _digits_of("residual CNN, digits"),
    "ViT, digits": Family(lambda numbers: _train_on_digits(VisionTransformer, 15, 2e-3, numbers), 10),
    "ResNet-20": Family(_load_stored, 3),
}
BASE = "adam"
SETTINGS: dict[str, dict[str, Any]] = {
    BASE: {"optimizer": "adam"},
    **{f"row-adam {lr}": {"optimizer": "row-adam", "lr": lr} for lr in (0.3, 0.5, 0.7, 1.0)},
}
HALVES = {"even": (0,), "odd": (1,), "all": (0, 1)}
WHEN = {"plain": False, "polished": True}


def measure(trial: Trial, options: dict[str, Any], on_midpoint: bool = False) -> Record:
    """A pair by one setting, without the polish and, if the objective is the distance, with it."""
    symmetry = ob.symmetry(trial.target, trial.batches[0][0][:2], verify=False)
    evaluate = mean_loss(trial.loss, trial.test)
    goal: dict[str, Any] = {"objective": ob.Midpoint(trial.loss), "data": trial.batches} if on_midpoint else {}
    record: Record = {}
    for when, polish in WHEN.items():
        if polish and on_midpoint:
            continue
        begin = time.process_time()
        found = ob.align(
            trial.source, to=trial.target, symmetry=symmetry, method="sinkhorn", polish=polish, detect_copy=False,
            **goal, **options,
        )  # fmt: skip
        seconds = time.process_time() - begin
        path = ob.linear_path(trial.target, found.model, evaluate, num_points=trial.num_points, data=trial.batches[:5])
        measured = {"cost": found.cost, "barrier": path.barrier, "seconds": seconds, "steps": _count_steps(found)}
        record |= {f"{key} {when}": value for key, value in measured.items()}
    return record


def measure_copies(init: str, hidden: int, seeds: list[int], settings: list[str]) -> Iterator[Record]:
    """A cell of Table 1: whether the descents find each planted permutation."""
    networks = make_networks(init, hidden, seeds)
    symmetry = ob.symmetry(networks[0], torch.zeros(1, 1), verify=False)
    for seed, model in zip(seeds, networks, strict=True):
        twin = symmetry.random(torch.Generator().manual_seed(seed + 1)).apply(model)
        target = {key: value.detach() for key, value in model.state_dict().items()}
        for setting, (when, polish) in itertools.product(settings, WHEN.items()):
            begin = time.process_time()
            found = ob.align(
                twin, to=target, symmetry=symmetry, method="sinkhorn", polish=polish, detect_copy=False, seed=seed,
                **SETTINGS[setting],
            )  # fmt: skip
            measured = {"seconds": time.process_time() - begin, "exact": found.cost == 0, "steps": _count_steps(found)}
            yield {"cell": f"{init} {hidden}", "pair": seed, "setting": setting, "when": when, **measured}


def _count_steps(found: ob.Alignment[Any]) -> int:
    return 1 + max(entry.get("step", 0) for entry in found.history)


def describe_pairs(records: list[Record]) -> list[str]:
    """A row per family and setting: means over its pairs, and the paired difference from `BASE` in percent of its mean."""
    what = "cost before the polish | cost | test barrier before the polish | test barrier"
    lines = [f"| pairs | n | setting | {what} | steps | CPU s |", "|---" * 9 + "|"]
    for family in dict.fromkeys(r["family"] for r in records):
        chosen = [r for r in records if r["family"] == family]
        base = {r["pair"]: r for r in chosen if r["setting"] == BASE}
        for setting in dict.fromkeys(r["setting"] for r in chosen):
            rows = [r for r in chosen if r["setting"] == setting and r["pair"] in base]
            cells = [
                _compare([r[key] for r in rows], [base[r["pair"]][key] for r in rows]) if key in rows[0] else ""
                for key in (f"{what} {when}" for what in ("cost", "barrier") for when in WHEN)
            ]
            steps = f"{statistics.mean(r['steps plain'] for r in rows):.0f}"
            seconds = f"{statistics.mean(r.get('seconds polished', r['seconds plain']) for r in rows):.2g}"
            lines.append("| " + " | ".join([family, str(len(rows)), setting, *cells, steps, seconds]) + " |")
    return lines


def _compare(values: list[float], base: list[float]) -> str:
    """The mean, and by how much it differs, with the p-value of the paired t-test."""
    mean = f"{statistics.mean(values):.4g}"
    if values == base or len(values) < 2:
        return mean
    before, p = statistics.mean(base), f"p = {stats.ttest_rel(values, base).pvalue:.2g}"
    return f"{mean} ({100 * (statistics.mean(values) / before - 1):+.1f} %, {p})" if before else f"{mean} ({p})"


def describe_copies(records: list[Record]) -> list[str]:
    """A row per cell: how many copies each setting found, before and after the polish."""
    settings = list(dict.fromkeys(r["setting"] for r in records))
    lines = ["| planted copies | n | " + " | ".join(settings) + " |", "|---" * (2 + len(settings)) + "|"]
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record["cell"], []).append(record)
    for cell, chosen in {**cells, "all": records}.items():
        counts = [
            ", ".join(f"{sum(r['exact'] for r in chosen if (r['setting'], r['when']) == (s, w))} {w}" for w in WHEN)
            for s in settings
        ]
        num = len({(r["cell"], r["pair"]) for r in chosen})
        lines.append("| " + " | ".join([cell, str(num), *counts]) + " |")
    return lines


def measure_all(options: argparse.Namespace) -> Iterator[Record]:
    """Records of all families, then of copies, one after the other."""
    for name in options.families:
        numbers = [n for n in range(min(options.pairs or 50, FAMILIES[name].num_pairs)) if n % 2 in HALVES[options.half]]
        for number, trial in zip(numbers, FAMILIES[name].make(numbers), strict=True):
            for setting in options.settings:
                described = {"family": name, "pair": number, "setting": setting, "on": "Mid" if options.midpoint else "L2"}
                yield {**described, **measure(trial, SETTINGS[setting], options.midpoint)}
    for init, hidden in itertools.product(INITS, DEPTHS) if options.copies else ():
        yield from measure_copies(init, hidden, list(range(options.copies)), options.settings)


def main() -> None:
    """Measure, unless records are only read, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("ONEBASIN_DATA"), help="the folder of MNIST and CIFAR-10")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=[BASE, "row-adam 0.5"])
    parser.add_argument("--half", choices=HALVES, default="odd", help="pairs with such numbers (default odd)")
    parser.add_argument("--pairs", type=int, help="of the first so many of each family, odd and even")
    parser.add_argument("--midpoint", action="store_true", help="descend on the loss at the midpoint")
    parser.add_argument("--copies", type=int, default=20, help="planted copies for each cell (default 20)")
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    parser.add_argument("--read", type=Path, help="print the tables of this file, and measure nothing")
    options = parser.parse_args()
    check_files(options.out)
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    if options.read:
        records = [json.loads(line) for line in options.read.read_text().splitlines()]
        records = [r for r in records if r["pair"] % 2 in HALVES[options.half] or "cell" in r]
    else:
        machine, records = describe_machine("cpu"), []
        for record in measure_all(options):
            records.append({**record, **machine})
            append(options.out, records[-1])
            print(".", end="", flush=True)
        print()
    for name in ("L2", "Mid"):
        if chosen := [r for r in records if r.get("on") == name]:
            print("\n".join([f"\n{name}:\n", *describe_pairs(chosen)]))
    if copies := [r for r in records if "cell" in r]:
        print("\n".join(["", *describe_copies(copies)]))


if __name__ == "__main__":
    main()
