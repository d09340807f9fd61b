"""What the settings of Sinkhorn do: step, temperature, rounds, start, gradient, length. One is changed at a time.

The settings of Table 2 are chosen here: on networks of other seeds, by the barrier on validation data.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.batched import align_pairs, measure_paths, permute
from experiments.summaries import mark_long_solves, mean_and_deviation, write_markdown
from experiments.table2 import TASKS, load_pairs, objective_of
from experiments.tasks import load
from onebasin.landscape.paths import LinearPath

FIRST_SEED = 1000  # Table 2 begins at 0
BASE: dict[str, Any] = {
    "lr": 0.2,
    "steps": 300,
    "patience": 50,
    "tau": 1.0,
    "num_iters": 20,
    "scale": 1.0,
    "noise": 0.0,
    "gradient": "implicit",
}
VALUES: dict[str, list[Any]] = {
    "lr": [0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
    "steps": [100, 300],
    "patience": [50, 300],
    "tau": [0.1, 0.3, 1.0, 3.0],
    "num_iters": [3, 5, 10, 20, 50],
    "scale": [0.1, 1.0, 2.0, 4.0],
    "noise": [0.0, 0.1, 1.0],
    "gradient": ["implicit", "unrolled"],
}


def configs(quick: bool) -> list[dict[str, Any]]:
    """Every value of every setting, the others at their base; the base itself once."""
    tasks = ["Pol3"] if quick else list(TASKS)
    num = 2 if quick else 10
    chosen = {"lr": [0.1], "gradient": ["unrolled"]} if quick else VALUES
    found = []
    for task in tasks:
        for method in ("l2-plain", "mid", "rnd"):
            cell = {"task": task, "width": TASKS[task].widths[1], "method": method, "num_pairs": num, "first": 0, "num": num}
            found.append({**cell, "setting": "base", "options": {**BASE}})
            for setting, values in chosen.items():
                changed = [v for v in values if v != BASE[setting]]
                found += [{**cell, "setting": setting, "options": {**BASE, setting: value}} for value in changed]
    return found


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The barrier on validation data, the costs, the gap between soft and hard, and the time."""
    if device == "cpu":
        torch.set_num_threads(1)
    pairs = load_pairs(config, device, FIRST_SEED)
    batches = None if config["method"] == "l2-plain" else pairs.batches
    objective = objective_of(config["method"], pairs.task)
    begin = time.perf_counter()
    found = align_pairs(pairs.model, pairs.symmetry, pairs.sources, pairs.targets, objective, batches, **config["options"])
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    moved = permute(pairs.symmetry, pairs.sources, found.indices)
    data = load(pairs.task, "validation").to(device)
    losses, _ = measure_paths(pairs.model, pairs.task.loss, pairs.targets, moved, data)
    weights = [float(w) for w in np.linspace(0, 1, losses.shape[1])]
    paths = [LinearPath(weights, {"loss": row.tolist()}) for row in losses]
    return {
        "barrier": [path.barrier for path in paths],
        "auc": [path.auc for path in paths],
        "cost": found.costs.tolist(),
        "gap": [hard - soft for soft, hard in zip(found.history[-1]["soft"], found.history[-1]["hard"], strict=True)],
        "steps": found.steps.tolist(),
        "seconds": seconds,
    }


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """For each task and cost a table: setting, barrier, cost, gap, steps, time."""
    tables = []
    for task in TASKS:
        for method in ("l2-plain", "mid", "rnd"):
            cell = [r for r in records if r["config"]["task"] == task and r["config"]["method"] == method]
            rows = []
            for record in cell:
                setting, result = record["config"]["setting"], record["result"]
                value = "" if setting == "base" else record["config"]["options"][setting]
                numbers = [mean_and_deviation(result[key]) for key in ("barrier", "cost", "gap", "steps")]
                solved = [record] if record["config"]["options"]["gradient"] == "implicit" else []
                label = mark_long_solves(f"{setting} {value}".strip(), solved)
                rows.append([label, *numbers, f"{result['seconds']:.2f}"])
            if rows:
                header = [
                    f"{task}, {method}",
                    "validation barrier",
                    "hard cost",
                    "hard - soft at the end",
                    "steps",
                    "seconds",
                ]
                tables.append((header, rows))
    write_markdown(folder / "sensitivity.md", "What the settings do", tables, records)
