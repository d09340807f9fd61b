"""Table 2: the loss on the line between two trained networks, before and after one of them is permuted.

Two hidden layers; pairs of networks that differ in their start and in the order of the data. Sinkhorn runs on all pairs at
once, the other methods pair by pair. A strip of widths says what a barrier of zero means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import onebasin as ob
from experiments.authors import align_authors
from experiments.batched import align_pairs, measure_paths, permute
from experiments.tasks import TASKS, Data, Stack, Task, load, trained_networks
from onebasin.landscape.paths import LinearPath

NUM_PAIRS, NUM_POINTS = 50, 25
NUM_MEASURED = 10_000  # training images that the line is measured on, at most
WIDTHS = (64, 128, 256, 512)
METHODS = {
    "naive": "naive",
    "repair": "naive, re-calibrated (REPAIR)",
    "auto": "the default, without data",
    "auto-mid": "the default on Mid",
    "wm": "weight matching",
    "activation": "activation matching",
    "ste": "STE",
    "l2": "Sinkhorn L2",
    "l2-plain": "Sinkhorn L2, without polish",
    "mid": "Sinkhorn Mid",
    "rnd": "Sinkhorn Rnd",
    "wm+ste": "WM, then STE",
    "wm+l2": "WM, then Sinkhorn L2",
    "wm+mid": "WM, then Sinkhorn Mid",
    "wm+rnd": "WM, then Sinkhorn Rnd",
    "authors-l2": "authors' L2",
    "authors-mid": "authors' Mid",
    "authors-rnd": "authors' Rnd",
}
# The initial learning rates of the paper's appendix, for the authors' rows.
AUTHORS_LR = {
    "L2": {"Pol1": 0.1, "Pol3": 0.1, "MNIST": 0.01, "CIFAR-10": 0.01},
    "Mid": {"Pol1": 0.1, "Pol3": 0.1, "MNIST": 0.1, "CIFAR-10": 0.1},
    "Rnd": {"Pol1": 0.01, "Pol3": 0.01, "MNIST": 0.1, "CIFAR-10": 0.1},
}


def configs(quick: bool) -> list[dict[str, Any]]:
    """The four columns with all methods, then the strip of widths."""
    if quick:
        tasks, num, methods = ["Pol1", "Pol3"], 4, [m for m in METHODS if not m.startswith("authors")]
        return [c for task in tasks for m in methods for c in _cell(task, TASKS[task].widths[1], m, num)]
    found = [c for task in TASKS for m in METHODS for c in _cell(task, TASKS[task].widths[1], m, NUM_PAIRS)]
    strip = ("naive", "wm", "activation", "ste", "l2", "mid", "rnd")
    for task in ("MNIST", "CIFAR-10"):
        found += [c for width in WIDTHS[1:] for m in strip for c in _cell(task, width, m, 10)]
    return found


def options_of(task: str, method: str) -> dict[str, Any]:
    """Settings chosen on the networks of `experiments.sensitivity`, by their validation loss."""
    if method in ("mid", "rnd"):
        chosen = {"lr": 0.05} if TASKS[task].is_classification else {"lr": 0.3, "scale": 0.1, "check_every": 1}
        return {**chosen, "steps": 1000, "patience": 300}
    return {"steps": 600, "patience": 300} if method in ("l2", "l2-plain", "ste") else {}


def _cell(task: str, width: int, method: str, num: int) -> list[dict[str, Any]]:
    """Trials of one method on one column: methods that go pair by pair are cut into trials of ten pairs."""
    options = options_of(task, method.removeprefix("wm+"))
    whole = {"task": task, "width": width, "method": method, "num_pairs": num, "options": options}
    if method.startswith("authors"):
        return [{**whole, "first": i, "num": 1} for i in range(min(num, 10))]
    together = ("l2", "l2-plain", "mid", "rnd", "naive")
    step = num if method.removeprefix("wm+") in together else min(num, 10)
    return [{**whole, "first": first, "num": step} for first in range(0, num, step)]


@dataclass
class Pairs:
    """Pairs of trained networks of one architecture: the `sources` are permuted, the `targets` stay."""

    task: Task
    model: nn.Module
    symmetry: ob.Symmetry
    targets: Stack
    sources: Stack
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    device: str

    def __len__(self) -> int:
        return len(next(iter(self.sources.values())))

    def modules(self, number: int) -> tuple[nn.Module, nn.Module]:
        """One pair as modules: source and target."""
        result = []
        for stack in (self.sources, self.targets):
            module = self.task.make_model().to(self.device)
            module.load_state_dict({key: value[number] for key, value in stack.items()})
            result.append(module)
        return result[0], result[1]


def load_pairs(config: dict[str, Any], device: str, first_seed: int = 0) -> Pairs:
    """Train (or read) the networks of a column and take the pairs of a trial."""
    task = TASKS[config["task"]].widened(config["width"])
    stack = trained_networks(task, list(range(first_seed, first_seed + 2 * config["num_pairs"])), device)
    last = config["first"] + config["num"]
    sources = {key: value[1::2][config["first"] : last] for key, value in stack.items()}
    targets = {key: value[0::2][config["first"] : last] for key, value in stack.items()}
    model = task.make_model().to(device)
    symmetry = ob.symmetry(model, torch.zeros(1, task.widths[0], device=device), verify=False)
    batch = 100 if not task.is_classification else 1000
    return Pairs(task, model, symmetry, targets, sources, load(task, "train").to(device).batches(batch), device)


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Move the sources by a method, then measure the line on training and test data."""
    if device == "cpu":
        torch.set_num_threads(1)
    pairs = load_pairs(config, device)
    method, options = config["method"], config["options"]
    begin = time.perf_counter()
    if method == "repair":
        return {"seconds_each": 0.0, **_measure(pairs, _repaired_curves)}
    if method.startswith("authors"):
        moved = _align_by_authors(pairs, method.removeprefix("authors-").capitalize())
    else:
        moved = move(pairs, method, options)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / len(pairs)

    def curves(pairs: Pairs, data: Data) -> tuple[np.ndarray, np.ndarray]:
        return measure_paths(pairs.model, pairs.task.loss, pairs.targets, moved, data, NUM_POINTS)

    return {"seconds_each": seconds, **_measure(pairs, curves)}


def move(pairs: Pairs, method: str, options: dict[str, Any]) -> Stack:
    """The sources, permuted by a method; ``wm+...`` starts from weight matching."""
    if method == "naive":
        return pairs.sources
    if method.startswith("wm+"):
        started = Pairs(**{**vars(pairs), "sources": move(pairs, "wm", {})})
        return move(started, method.removeprefix("wm+"), options)
    if method in ("l2", "l2-plain", "mid", "rnd"):
        objective = objective_of(method, pairs.task)
        batches = None if method.startswith("l2") else pairs.batches
        found = align_pairs(pairs.model, pairs.symmetry, pairs.sources, pairs.targets, objective, batches, **options)
        moved = permute(pairs.symmetry, pairs.sources, found.indices)
        if method != "l2":
            return moved
        # The polish of `onebasin.align`: sweeps of weight matching that start where Sinkhorn ended.
        polished = Pairs(**{**vars(pairs), "sources": moved})
        return _one_by_one(polished, {"method": "weight-matching", "init": pairs.symmetry.identity()})
    settings: dict[str, Any] = {
        "auto": {},
        "auto-mid": {"data": pairs.batches, "objective": ob.Midpoint(pairs.task.loss)},
        "wm": {"method": "weight-matching"},
        "activation": {"method": "activation-matching", "data": pairs.batches},
        "ste": {"method": "ste", "data": pairs.batches, "objective": ob.Midpoint(pairs.task.loss), **options},
    }[method]
    return _one_by_one(pairs, settings)


def objective_of(method: str, task: Task) -> Any:
    """The paper's three costs."""
    if method.startswith("l2"):
        return ob.WeightDistance()
    return {"mid": ob.Midpoint, "rnd": ob.RandomPoint}[method](task.loss)


def _one_by_one(pairs: Pairs, settings: dict[str, Any]) -> Stack:
    states = []
    for number in range(len(pairs)):
        source, target = pairs.modules(number)
        states.append(ob.align(source, to=target, symmetry=pairs.symmetry, **settings).model.state_dict())
    return {key: torch.stack([state[key] for state in states]) for key in pairs.sources}


def _align_by_authors(pairs: Pairs, kind: str) -> Stack:
    """Their costs with the paper's learning rates; the best hard model by the same cost on training data is kept."""
    states = []
    for number in range(len(pairs)):
        source, target = pairs.modules(number)
        objective = objective_of(kind.lower(), pairs.task).bind(pairs.model)
        reference = {key: value.detach() for key, value in target.state_dict().items()}

        def judge(state: Any, objective: Any = objective, reference: Any = reference) -> float:
            judged = pairs.batches[:4] if objective.uses_data else [None]
            with torch.no_grad():
                return float(np.mean([float(objective.judge(state, reference, batch)) for batch in judged]))

        state, _ = align_authors(
            source,
            target,
            pairs.task.widths[0],
            kind,
            judge,
            batches=pairs.batches,
            loss=pairs.task.loss,
            lr=AUTHORS_LR[kind][pairs.task.name],
            max_epochs=1000 if not pairs.task.is_classification or kind == "L2" else 50,
            patience=50 if not pairs.task.is_classification or kind == "L2" else 10,
            device=pairs.device,
        )
        states.append(state)
    return {key: torch.stack([state[key] for state in states]) for key in pairs.sources}


def _repaired_curves(pairs: Pairs, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Every point of the naive line with the statistics of its units corrected, on two batches of training data."""
    losses, accuracies = [], []
    for weight in np.linspace(0, 1, NUM_POINTS):
        states = []
        for number in range(len(pairs)):
            source, target = pairs.modules(number)
            mixed = pairs.task.make_model().to(pairs.device)
            ends = (target.state_dict(), source.state_dict())
            mixed.load_state_dict({key: torch.lerp(ends[0][key], ends[1][key], float(weight)) for key in ends[0]})
            share = [1 - float(weight), float(weight)]
            states.append(ob.repair(mixed, ends, pairs.batches[:2], pairs.symmetry, share, tolerance=float("inf")).state)
        stack = {key: torch.stack([state[key] for state in states]) for key in pairs.sources}
        loss, accuracy = measure_paths(pairs.model, pairs.task.loss, stack, stack, data, num_points=1)
        losses.append(loss)
        accuracies.append(accuracy)
    return np.concatenate(losses, 1), np.concatenate(accuracies, 1)


def _measure(pairs: Pairs, curves: Callable[[Pairs, Data], tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    weights = [float(w) for w in np.linspace(0, 1, NUM_POINTS)]
    for split in ("train", "test"):
        data = load(pairs.task, split)
        data = Data(data.x[:NUM_MEASURED], data.y[:NUM_MEASURED]).to(pairs.device)
        losses, accuracies = curves(pairs, data)
        paths = [LinearPath(weights, {"loss": row.tolist()}) for row in losses]
        result[split] = {
            "barrier": [path.barrier for path in paths],
            "auc": [path.auc for path in paths],
            "ends": [[row[0], row[-1]] for row in losses.tolist()],
            "middle_accuracy": accuracies[:, NUM_POINTS // 2].tolist() if pairs.task.is_classification else [],
            "mean_losses": losses.mean(0).tolist(),
            "mean_accuracies": accuracies.mean(0).tolist() if pairs.task.is_classification else [],
        }
    return result


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Tables and curves."""
    from experiments.table2_drawing import draw_all

    draw_all(records, folder)
