"""What is run for the continual-learning table: the authors' settings, ablations, grids on validation data, chosen settings.

A variant is a dictionary of options of a strategy; what it does not name has the library's default.
"""

from __future__ import annotations

import itertools
from typing import Any

Variant = dict[str, Any]

# ---------------------------------------------------------------------------------------------------- the authors' settings

REBASIN_MNIST: Variant = {"batch_size": 500, "epochs": 5, "noise": 0.1}
REBASIN_CIFAR: Variant = {"batch_size": 10, "epochs": 5, "first_epochs": 20, "noise": 0.1, "lr": 0.5, "decay": 1e-4}
AUTHORS: dict[str, dict[str, Variant]] = {
    "mnist": {
        "agem": {"lr": 0.001, "batch_size": 10, "epochs": 10, "replay_size": 50},
        # Avalanche leaves out the half in front of lambda, and squares the gradients of batches of ten.
        "ewc": {"lr": 0.01, "batch_size": 10, "epochs": 5, "strength": 200.0, "fisher_batch": 10, "num_fisher": 6000},
        "lwf": {"lr": 0.001, "batch_size": 10, "epochs": 5, "strength": 1.0, "temperature": 0.5},
        "finetune": {"lr": 0.01, "batch_size": 10, "epochs": 5},
        "joint": {"lr": 0.1, "batch_size": 500, "epochs": 50},
    },
    "cifar": {
        # They permuted linear layers only, and this network has no hidden one.
        "rebasin": {**REBASIN_CIFAR, "groups": []},
        "agem": {"lr": 0.001, "batch_size": 10, "epochs": 10, "replay_size": 50},
        "ewc": {"lr": 0.01, "batch_size": 10, "epochs": 5, "strength": 200.0, "fisher_batch": 10, "num_fisher": 1000},
        "lwf": {"lr": 0.001, "batch_size": 10, "epochs": 5, "strength": 1.0, "temperature": 0.5},
        "finetune": {"lr": 0.01, "batch_size": 10, "epochs": 5},
        "joint": {"lr": 0.1, "batch_size": 500, "epochs": 50},
    },
}

# ---------------------------------------------------------------------------------------------------------------- ablations

ABLATIONS: dict[str, Variant] = {
    "as the authors": {},
    "no permutation": {"groups": []},
    "no residual": {"residual": False},
    "no replay": {"memory_per_class": 0},
    "no permutation, no replay": {"groups": [], "memory_per_class": 0},
    "equal weighting": {"weighting": "equal"},
    "equal weighting, no permutation": {"weighting": "equal", "groups": []},
    "no noise at the start": {"noise": 0.0},
    "start at mass 0.9": {"noise": 0.0, "mass": 0.9},
    **{f"alpha {alpha / 10:.1f}": {"alpha": alpha / 10} for alpha in (0, 1, 2, 3, 4, 5, 6, 7, 9, 10)},
}


# -------------------------------------------------------------------------------------------------------------------- grids


def grid(**values: list[Any]) -> list[Variant]:
    """Every combination."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _mnist_grid(**values: list[Any]) -> list[Variant]:
    """The batches and the first network of re-basin, so that nothing but the strategy differs."""
    return [{"batch_size": 500, "epochs": 5, "first_lr": 1e-3, **variant} for variant in grid(**values)]


def _cifar_grid(**values: list[Any]) -> list[Variant]:
    return [{"batch_size": 10, "epochs": 5, "first_lr": 1e-3, "first_epochs": 20, **variant} for variant in grid(**values)]


# Step, clip and weight decay of the residual: the authors' first.
_MNIST_RESIDUALS = [
    (0.05, 1e-3, 0.1), (0.05, 1e-3, 0.01), (0.05, 1e-3, 0.0), (0.05, 3e-3, 0.1), (0.05, 3e-3, 0.01),
    (0.05, 1e-2, 0.1), (0.05, 1e-2, 0.01), (0.05, None, 0.1), (0.05, None, 0.01), (0.02, None, 0.03),
]  # fmt: skip
_CIFAR_RESIDUALS = [
    (0.5, 1e-3, 1e-4), (0.5, 1e-3, 1e-2), (0.2, 1e-3, 1e-3), (0.05, 1e-3, 1e-2), (0.05, None, 1e-3), (0.01, None, 1e-2),
]  # fmt: skip
# With the permutation at two weights in the fusion, and without it: the same settings for both.
_MOVES: list[Variant] = [{"alpha": 0.8}, {"alpha": 0.5}, {"groups": []}]

GRIDS: dict[str, dict[str, list[Variant]]] = {
    "mnist": {
        "rebasin": [
            {**REBASIN_MNIST, "lr": lr, "clip": clip, "decay": decay, "weighting": weighting, **move}
            for lr, clip, decay in _MNIST_RESIDUALS
            for weighting in ("pooled", "equal")
            for move in _MOVES
        ],
        "replay": _mnist_grid(lr=[0.003, 0.01, 0.03, 0.1], weighting=["pooled", "equal"], epochs=[1, 5]),
        "derpp": _mnist_grid(lr=[0.01, 0.03, 0.1], alpha=[0.1, 0.5], beta=[0.5, 1.0]),
        "agem": _mnist_grid(lr=[0.01, 0.03, 0.1], epochs=[1, 5], replay_size=[256]),
        "ewc": _mnist_grid(lr=[0.003, 0.01, 0.03], strength=[1.0, 10.0, 100.0]),
        "lwf": _mnist_grid(lr=[0.003, 0.01, 0.03], strength=[0.5, 2.0], temperature=[2.0]),
        "finetune": _mnist_grid(lr=[0.001, 0.003, 0.01], epochs=[1, 5]),
    },
    "cifar": {
        "rebasin": [
            {**REBASIN_CIFAR, "lr": lr, "clip": clip, "decay": decay, **replay, **move}
            for lr, clip, decay in _CIFAR_RESIDUALS
            for replay in ({"replay_size": 10}, {"replay_size": 50, "weighting": "equal"})
            for move in _MOVES[::2]
        ],
        "replay": [
            {**variant, **replay}
            for variant in _cifar_grid(lr=[0.01, 0.03, 0.1], reset_norms=[False, True])
            for replay in ({"replay_size": 10}, {"replay_size": 50, "weighting": "equal"})
        ],
        "derpp": _cifar_grid(lr=[0.01, 0.03, 0.1], alpha=[0.1, 0.5]),
        "agem": _cifar_grid(lr=[0.01, 0.03, 0.1], replay_size=[50]),
        "ewc": _cifar_grid(lr=[0.01, 0.03], strength=[10.0, 100.0, 1000.0], num_fisher=[500]),
        "lwf": _cifar_grid(lr=[0.01, 0.03], strength=[0.5, 2.0], temperature=[2.0]),
        "finetune": _cifar_grid(lr=[0.01, 0.03, 0.1]),
    },
}

# The best mean validation accuracy of each grid, as ``--draw`` prints it from the records of the stage "tune".
CHOSEN: dict[str, list[tuple[str, str, Variant]]] = {"mnist": [], "cifar": []}

# ------------------------------------------------------------------------------------------------------------------- trials

_SEEDS = {"mnist": [0, 1, 2, 3, 4], "cifar": [0, 1, 2]}
_MORE_SEEDS = {"mnist": [5, 6, 7, 8, 9], "cifar": []}  # where the question is whether the permutation helps
_TUNING = {"mnist": ([100, 101], 20), "cifar": ([100], 3)}  # seeds that no test has, and tasks
_MOST_RUNS = 16  # side by side in one process
_DEEP_ABLATIONS = ("as the authors", "no permutation", "no residual", "no replay", "equal weighting")


def list_trials(quick: bool) -> list[dict[str, Any]]:
    """Every trial of the experiment, the most important first."""
    if quick:
        small = {"batch_size": 500, "epochs": 1}
        runs = [_run("rebasin", "rebasin", {**small, "noise": 0.1})]
        runs += [_run(name, name, {**small, "lr": 0.03}) for name in ("replay", "finetune")]
        return _cut("authors", "mnist", runs, [0], num_tasks=3)
    trials: list[dict[str, Any]] = []
    for benchmark, seeds in _SEEDS.items():
        runs = [_run(row, name, variant) for row, name, variant in CHOSEN[benchmark]]
        trials += _cut("chosen", benchmark, runs, seeds + _MORE_SEEDS[benchmark])
    trials += _tuning_trials("cifar")
    runs = [_run("as the authors", "rebasin", AUTHORS["cifar"]["rebasin"]), _run("all permuted", "rebasin", REBASIN_CIFAR)]
    trials += _cut("ablation", "cifar", runs, _SEEDS["cifar"])
    trials += _authors_trials("mnist")
    trials += _tuning_trials("mnist")
    ablations = {row: {**REBASIN_MNIST, **change} for row, change in ABLATIONS.items()}
    for layers in (1, 2):
        rows = ablations if layers == 1 else _DEEP_ABLATIONS
        runs = [_run(row, "rebasin", ablations[row]) for row in rows]
        trials += _cut("ablation", "mnist", runs, _SEEDS["mnist"], layers=layers)
        trials += _cut("ablation", "mnist", runs[:2], _MORE_SEEDS["mnist"], layers=layers)
    trials += _authors_trials("cifar")
    return trials + _cost_trials("mnist") + _cost_trials("cifar")


def _tuning_trials(benchmark: str) -> list[dict[str, Any]]:
    seeds, num_tasks = _TUNING[benchmark]
    runs = [_run(name, name, variant) for name, variants in GRIDS[benchmark].items() for variant in variants]
    return _cut("tune", benchmark, runs, seeds, num_tasks)


def _authors_trials(benchmark: str) -> list[dict[str, Any]]:
    """Baselines, all in one trial: those with batches of ten take long however few share the device."""
    runs = [_run(name, name, variant) for name, variant in AUTHORS[benchmark].items() if name != "rebasin"]
    return _cut("authors", benchmark, runs, _SEEDS[benchmark], most=100)


def _run(row: str, strategy: str, variant: Variant) -> dict[str, Any]:
    return {"row": row, "strategy": strategy, "variant": variant}


def _cut(
    stage: str,
    benchmark: str,
    runs: list[dict[str, Any]],
    seeds: list[int],
    num_tasks: int = 20,
    layers: int = 1,
    most: int = _MOST_RUNS,
) -> list[dict[str, Any]]:
    """Trials that hold as many runs as fit side by side."""
    size = max(1, most // len(seeds))
    trial = {"stage": stage, "benchmark": benchmark, "num_tasks": num_tasks, "layers": layers, "seeds": seeds}
    return [{**trial, "runs": runs[i : i + size]} for i in range(0, len(runs), size)]


def _cost_trials(benchmark: str) -> list[dict[str, Any]]:
    size, epochs = (500, 5) if benchmark == "mnist" else (10, 1)
    variant = {"batch_size": size, "epochs": epochs, "first_epochs": 1, "replay_size": size}
    return [
        {**trial, "capture": capture}
        for name in ("finetune", "replay", "derpp", "agem", "lwf", "ewc", "rebasin")
        for trial in _cut("cost", benchmark, [_run(name, name, variant)], [0], num_tasks=2)
        for capture in (True, False)
    ]
