"""How far must the plans and their gradient be solved? ``python -m benchmarks.accuracy [--pairs 6]``.

Pairs of MLPs trained on MNIST (``ONEBASIN_DATA``: 9,000 images, 20 epochs), of seeds that no table uses, are aligned with
other numbers of rounds of the operator and steps of its gradient's solver. Printed are means over the pairs: the hard cost
of the result (what the descent minimises: L2 distance, or loss on the line), the test barrier, and how many results are the
very same permutation as with 20 rounds and a full solution. L2 takes 100 steps without copy detection or polish,
and also looks for a planted copy; Mid and Rnd take 300 steps with a rate of 0.05.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import onebasin as ob
from benchmarks.measuring import append, describe_machine
from benchmarks.steps import INPUTS, make_mlp
from onebasin.datasets import mnist

FIRST_SEED = 9000
REFERENCE = (20, 200)
SETTINGS = (REFERENCE, (20, 20), (20, 10), (20, 5), (20, 3), (20, 1), (50, 10), (10, 10), (10, 5), (5, 10), (3, 10))
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def load(split: Any, num: int) -> Batches:
    images, labels = mnist(split)
    return list(zip((images[:num].flatten(1) / 255).split(1000), labels[:num].split(1000), strict=True))


def train(width: int, seed: int, data: Batches) -> nn.Module:
    model = make_mlp(width, seed=seed)
    images, labels = (torch.cat(column) for column in zip(*data, strict=True))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    for _ in range(20):
        for chosen in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model


def align(kind: str, source: nn.Module, target: nn.Module, symmetry: ob.Symmetry, data: Batches, **options: Any) -> Any:
    """By one of the paper's costs, to the end."""
    options |= {"symmetry": symmetry, "patience": 10**6}
    if kind in ("L2", "copy"):
        return ob.align(source, to=target, steps=100, detect_copy=False, polish=False, **options)
    objective: Any = {"Mid": ob.Midpoint, "Rnd": ob.RandomPoint}[kind](cross_entropy)
    return ob.align(source, to=target, objective=objective, data=data, steps=300, lr=0.05, check_every=20, **options)


def run_pair(width: int, seed: int, data: Batches, test: Batches) -> list[dict[str, Any]]:
    """Every setting on one pair."""
    target, source = train(width, seed, data), train(width, seed + 1, data)
    symmetry = ob.symmetry(target, torch.zeros(1, INPUTS), verify=False)
    twin = copy.deepcopy(target)
    twin.load_state_dict(symmetry.random(torch.Generator().manual_seed(seed)).apply(target))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return sum(float(cross_entropy(model(x), y)) for x, y in test) / len(test)

    records = []
    for kind in ("L2", "Mid", "Rnd", "copy"):
        reference = None
        for rounds, steps in SETTINGS:
            start = twin if kind == "copy" else source
            found = align(kind, start, target, symmetry, data, num_iters=rounds, solver_steps=steps)
            reference = reference or found.permutation
            record = {"kind": kind, "width": width, "seed": seed, "rounds": rounds, "solver_steps": steps}
            record |= {"cost": found.cost, "same": found.permutation == reference, "seconds": found.seconds}
            records.append(record | {"barrier": ob.linear_path(target, found.model, evaluate, num_points=11).barrier})
    return records


def describe(records: list[dict[str, Any]]) -> str:
    """A table of means."""
    kinds = ("L2", "Mid", "Rnd", "copy")
    lines = ["| rounds | solver steps | " + " | ".join(kinds) + " |", "|---" * 6 + "|"]
    for rounds, steps in SETTINGS:
        cells = []
        for kind in kinds:
            chosen = [r for r in records if (r["kind"], r["rounds"], r["solver_steps"]) == (kind, rounds, steps)]
            cost, barrier = (sum(r[key] for r in chosen) / len(chosen) for key in ("cost", "barrier"))
            same = sum(r["same"] for r in chosen)
            if kind == "copy":
                cells.append(f"{sum(r['cost'] == 0 for r in chosen)} of {len(chosen)} exact")
            else:
                cells.append(f"{cost:.5g}, barrier {barrier:.4f}, {same} of {len(chosen)} the same")
        lines.append(f"| {rounds} | {steps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train, align, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, help="append the records to this file, a line of JSON each")
    parser.add_argument("--read", type=Path, help="run nothing: take the records of this file")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    if options.read:
        records = [json.loads(line) for line in options.read.read_text().splitlines()]
    else:
        data, test = load("train", 9000), load("test", 10000)
        for pair in range(options.pairs):
            found = run_pair(options.width, FIRST_SEED + 2 * pair, data, test)
            records += [{**describe_machine("cpu"), **record} for record in found]
            for record in records[-len(found) :]:
                append(options.out, record)
    print(describe(records))


if __name__ == "__main__":
    main()
