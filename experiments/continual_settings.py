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
        "rebasin": REBASIN_MNIST,
    },
    "cifar": {
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


_REBASIN_GRID = grid(clip=[1e-3, 3e-3, 1e-2, None], decay=[0.1, 0.01], weighting=["pooled", "equal"])
GRIDS: dict[str, dict[str, list[Variant]]] = {
    "mnist": {
        "rebasin": [
            {**REBASIN_MNIST, **variant, "groups": groups, "alpha": alpha}
            for variant in _REBASIN_GRID
            for groups, alpha in ((None, 0.8), (None, 0.5), ([], 0.8))
        ],
        "replay": _mnist_grid(lr=[0.003, 0.01, 0.03, 0.1], weighting=["pooled", "equal"], epochs=[1, 5]),
        "derpp": _mnist_grid(lr=[0.003, 0.01, 0.03, 0.1], alpha=[0.1, 0.5, 1.0], beta=[0.5, 1.0]),
        "agem": _mnist_grid(lr=[0.003, 0.01, 0.03, 0.1], epochs=[1, 5], replay_size=[256]),
        "ewc": _mnist_grid(lr=[0.003, 0.01, 0.03], strength=[1.0, 10.0, 100.0], epochs=[1, 5]),
        "lwf": _mnist_grid(lr=[0.003, 0.01, 0.03], strength=[0.5, 2.0], temperature=[2.0], epochs=[1, 5]),
        "finetune": _mnist_grid(lr=[0.001, 0.003, 0.01, 0.03], epochs=[1, 5]),
    },
    "cifar": {
        "rebasin": [
            {**REBASIN_CIFAR, **variant, "groups": groups}
            for variant in grid(lr=[0.05, 0.5], clip=[1e-3, 1e-2, None], decay=[1e-4, 1e-2], weighting=["equal"])
            for groups in (None, [])
            if not (variant["lr"] == 0.5 and variant["clip"] is None)
        ],
        "replay": _cifar_grid(lr=[0.01, 0.03, 0.1], weighting=["pooled"], epochs=[1, 5], reset_norms=[False, True]),
        "derpp": _cifar_grid(lr=[0.01, 0.03, 0.1], alpha=[0.1, 0.5], beta=[0.5]),
        "agem": _cifar_grid(lr=[0.01, 0.03, 0.1], epochs=[1, 5], replay_size=[50]),
        "ewc": _cifar_grid(lr=[0.01, 0.03], strength=[10.0, 100.0, 1000.0], num_fisher=[500]),
        "lwf": _cifar_grid(lr=[0.01, 0.03], strength=[0.5, 2.0], temperature=[2.0]),
        "finetune": _cifar_grid(lr=[0.01, 0.03, 0.1], epochs=[1, 5]),
    },
}

# The best mean validation accuracy of each grid; filled in from the records of the stage "tune".
CHOSEN: dict[str, dict[str, Variant]] = {"mnist": {}, "cifar": {}}

_SEEDS = {"mnist": [0, 1, 2, 3, 4], "cifar": [0, 1, 2]}
_MOST_RUNS = 12  # side by side in one process


def list_trials(quick: bool) -> list[dict[str, Any]]:
    """Every trial of the experiment, by stage, the longest first within it."""
    if quick:
        small = {"batch_size": 500, "epochs": 1}
        kinds = {"rebasin": {**small, "noise": 0.1}, "replay": {**small, "lr": 0.03}, "finetune": {**small, "lr": 0.03}}
        return [_trial("authors", "mnist", name, [variant], [0], num_tasks=3) for name, variant in kinds.items()]
    trials = []
    for benchmark, seeds in _SEEDS.items():
        for name, variant in AUTHORS[benchmark].items():
            trials.append(_trial("authors", benchmark, name, [variant], seeds))
        whole = {**REBASIN_CIFAR} if benchmark == "cifar" else {**REBASIN_MNIST}
        if benchmark == "cifar":
            trials.append(_trial("ablation", benchmark, "rebasin", [whole], seeds))
        else:
            trials.append(_trial("authors", benchmark, "rebasin", [whole], seeds, layers=2))
            for layers in (1, 2):
                variants = [{**REBASIN_MNIST, **ablation} for ablation in ABLATIONS.values()]
                trials += [
                    _trial("ablation", benchmark, "rebasin", part, seeds, layers=layers)
                    for part in _parts(variants, _MOST_RUNS // len(seeds))
                ]
        tuned_on, seeds_of_tuning = (3, [0]) if benchmark == "cifar" else (20, [0])
        for name, variants in GRIDS[benchmark].items():
            trials += [
                _trial("tune", benchmark, name, part, seeds_of_tuning, num_tasks=tuned_on)
                for part in _parts(variants, _MOST_RUNS)
            ]
        for name, variant in CHOSEN[benchmark].items():
            trials.append(_trial("chosen", benchmark, name.partition(" ")[0], [variant], seeds))
        trials += _cost_trials(benchmark)
    return trials


def _trial(
    stage: str,
    benchmark: str,
    strategy: str,
    variants: list[Variant],
    seeds: list[int],
    num_tasks: int = 20,
    layers: int = 1,
) -> dict[str, Any]:
    trial = {"stage": stage, "benchmark": benchmark, "strategy": strategy, "num_tasks": num_tasks}
    return {**trial, "layers": layers, "variants": variants, "seeds": seeds}


def _parts(variants: list[Variant], size: int) -> list[list[Variant]]:
    return [variants[i : i + size] for i in range(0, len(variants), size)]


def _cost_trials(benchmark: str) -> list[dict[str, Any]]:
    size = 500 if benchmark == "mnist" else 10
    variant = {"batch_size": size, "epochs": 5, "first_epochs": 1, "replay_size": size}
    names = ("finetune", "replay", "derpp", "agem", "lwf", "ewc", "rebasin")
    return [
        {**_trial("cost", benchmark, name, [variant], [0], num_tasks=2), "capture": capture}
        for name in names
        for capture in (True, False)
    ]
