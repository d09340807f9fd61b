"""Table 1: is the permutation that made a copy found again?

Ten-unit tanh networks of 2, 4 and 8 hidden layers, with weights from N(0, 1) or trained on a polynomial, are aligned with a
random permutation of themselves. A network counts as exact if every entry of the permutation is right.
"""

from __future__ import annotations

import itertools
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from experiments.authors import align_authors
from experiments.summaries import mark_long_solves, mean_and_deviation, write_markdown
from experiments.tasks import TASKS, Task, trained_networks

INITS, DEPTHS = ("Rnd", "Pol3", "Pol1"), (2, 4, 8)
METHODS = {
    "wm": "weight matching",
    "wm-restarts": "weight matching, restarts for as long as ours takes",
    "sinkhorn": "Sinkhorn L2 (ours), defaults: copy detection, then descent and polish",
    "sinkhorn-descent": "Sinkhorn L2 (ours), descent and polish",
    "sinkhorn-no-polish": "Sinkhorn L2 (ours), descent alone",
    "sinkhorn-restarts": "Sinkhorn L2 (ours), descent and polish, up to 5 restarts",
    "sinkhorn-unrolled": "Sinkhorn L2 (ours), descent alone, unrolled gradient",
    "authors": "Sinkhorn L2 (authors' package)",
}
DESCENTS = ("sinkhorn-descent", "sinkhorn-no-polish", "sinkhorn-restarts")
"""Methods whose answers come from a descent with the implicit gradient."""


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is a cell of the table: fifty networks by one method."""
    num = 5 if quick else 50
    chosen = [m for m in METHODS if not (quick and m == "authors")]
    return [
        {"init": i, "hidden": h, "method": m, "first": 0, "num": num} for i, h, m in itertools.product(INITS, DEPTHS, chosen)
    ]


def make_networks(init: str, hidden: int, seeds: list[int]) -> list[nn.Module]:
    """Ten units per layer; of "Rnd", random networks, every parameter is normal, as in the paper."""
    task: Task = replace(TASKS["Pol1" if init == "Rnd" else init], widths=(1, *[10] * hidden, 1))
    models = []
    stack = None if init == "Rnd" else trained_networks(task, seeds, "cpu")
    for number, seed in enumerate(seeds):
        model = task.make_model()
        if stack is None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(generator=generator)
        else:
            model.load_state_dict({key: value[number] for key, value in stack.items()})
        models.append(model)
    return models


def run(config: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """For each network: exact or not, the L1 distance that is left, steps and seconds. Always on the CPU: they are tiny."""
    torch.set_num_threads(1)
    seeds = list(range(config["first"], config["first"] + config["num"]))
    networks = make_networks(config["init"], config["hidden"], seeds)
    symmetry = ob.symmetry(networks[0], torch.zeros(1, 1))
    return [_find_planted(config["method"], model, symmetry, seed) for model, seed in zip(networks, seeds, strict=True)]


def _find_planted(method: str, model: nn.Module, symmetry: ob.Symmetry, seed: int) -> dict[str, Any]:
    planted = symmetry.random(torch.Generator().manual_seed(seed + 1))
    target = {key: value.detach() for key, value in model.state_dict().items()}
    copy = planted.apply(model)
    begin = time.perf_counter()
    found, steps = _solve(method, model, copy, target, symmetry, seed)
    seconds = time.perf_counter() - begin
    distance = sum(float((found[key] - target[key]).abs().sum()) for key in target)
    count = sum(value.numel() for value in target.values())
    # The copy holds the numbers of the original, so a right permutation gives them back bit by bit.
    exact = all(torch.equal(found[key], target[key]) for key in target)
    return {"exact": exact, "l1_sum": distance, "l1_mean": distance / count, "steps": steps, "seconds": seconds}


def _solve(method: str, model: nn.Module, copy: Any, target: Any, symmetry: ob.Symmetry, seed: int) -> tuple[Any, int]:
    if method == "authors":
        source = deepcopy(model)
        source.load_state_dict(copy)
        distance = ob.WeightDistance("l1", tuple(target))
        return align_authors(
            source, model, 1, "L2", lambda state: float(distance(state, target)), identity=True, patience=100
        )
    if method == "wm-restarts":
        seconds = ob.align(copy, to=target, symmetry=symmetry, seed=seed, detect_copy=False).seconds
        once = ob.align(
            copy, to=target, symmetry=symmetry, seed=seed, method="weight-matching", order="random", detect_copy=False
        )
        restarts = int(seconds / once.seconds)
        options = {"method": "weight-matching", "order": "random", "detect_copy": False, "restarts": restarts}
        return ob.align(copy, to=target, symmetry=symmetry, seed=seed, **options).model, restarts + 1
    options: dict[str, Any] = {
        "wm": {"method": "weight-matching", "order": "random", "detect_copy": False},
        "sinkhorn": {},
        "sinkhorn-descent": {"detect_copy": False},
        "sinkhorn-no-polish": {"detect_copy": False, "polish": False},
        "sinkhorn-restarts": {"detect_copy": False, "restarts": 5},
        "sinkhorn-unrolled": {"detect_copy": False, "polish": False, "gradient": "unrolled"},
    }[method]
    result = ob.align(copy, to=target, symmetry=symmetry, seed=seed, **options)
    return result.model, len([entry for entry in result.history if entry["by"] != "polish"])


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """A table of exact recoveries and of what is left, for each method."""
    columns = [(i, h) for i in INITS for h in DEPTHS]
    lines = []
    for what in ("exact", "l1_sum", "l1_mean", "steps", "seconds"):
        rows = []
        for method, label in METHODS.items():
            cells = [r for r in records if r["config"]["method"] == method]
            by = {(r["config"]["init"], r["config"]["hidden"]): [x[what] for x in r["result"]] for r in cells}
            if by:
                label = mark_long_solves(label, cells) if method in DESCENTS else label
                rows.append([label, *[_cell(what, by.get(c)) for c in columns]])
                if what == "exact":
                    total = sum(sum(v) for v in by.values())
                    rows[-1].append(f"{total} of {sum(len(v) for v in by.values())}")
        header = [
            what.replace("_", " "),
            *[f"{'random' if i == 'Rnd' else i} {h}" for i, h in columns],
            *(["all"] if what == "exact" else []),
        ]
        lines.append((header, rows))
    write_markdown(folder / "table1.md", "Table 1: planted permutations", lines, records)


def _cell(what: str, values: list[float] | None) -> str:
    if not values:
        return ""
    return f"{sum(values)}/{len(values)}" if what == "exact" else mean_and_deviation(values)
