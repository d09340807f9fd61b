"""What is run for the continual-learning table: the authors' settings, re-basin without its parts, grids for tuning.

A variant is a dictionary of options of a strategy; what it does not name has the library's default. A trial with one variant
runs it on the test data. One with several first chooses the one with the best mean accuracy on validation data (held-out
training images, a seed of its own; on CIFAR ten tasks of classes in another order), and runs that on the test data. In the
stage "front" it also runs the best of those that forget little.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

Variant = dict[str, Any]
Trial = dict[str, Any]

SEEDS = [0, 1, 2, 3, 4]  # five, or the table has no test of a difference


class Tuning(NamedTuple):
    """On what settings are chosen.

    Attributes:
        seeds: That no test has.
        num_tasks: Of the stream.
        class_seed: Shuffles the classes of the stream; None keeps their order.
    """

    seeds: list[int]
    num_tasks: int
    class_seed: int | None = None


TUNING = {"mnist": Tuning([100], 20), "cifar": Tuning([100], 10, class_seed=1)}
LIMITS = {"mnist": (0.06, 0.1), "cifar": (0.05,)}
"""Of the forgetting on validation data, in the stage "front"; a stream of ten tasks forgets less than one of twenty."""


# ---------------------------------------------------------------------------------------------------- the authors' settings

REBASIN_MNIST: Variant = {"batch_size": 500, "epochs": 5, "noise": 0.1}
REBASIN_CIFAR: Variant = {"batch_size": 10, "epochs": 5, "first_epochs": 20, "noise": 0.1, "lr": 0.5, "decay": 1e-4}
# One epoch where they had five (A-GEM: ten) for LwF, A-GEM and EWC on MNIST, whose batches of ten are 600,000 steps
# otherwise, and for A-GEM on CIFAR; ten of joint training on CIFAR where they had fifty.
_AUTHORS_SGD: Variant = {"lr": 0.01, "batch_size": 10, "epochs": 5}
_AUTHORS: dict[str, Variant] = {
    "finetune": _AUTHORS_SGD,
    "lwf": {**_AUTHORS_SGD, "lr": 0.001, "strength": 1.0, "temperature": 0.5},
    "agem": {**_AUTHORS_SGD, "lr": 0.001, "replay_size": 50},
    # Avalanche leaves out the half in front of lambda, and squares the gradients of batches of ten.
    "ewc": {**_AUTHORS_SGD, "strength": 200.0, "fisher_batch": 10},
}
AUTHORS: dict[str, dict[str, Variant]] = {
    "mnist": {**_AUTHORS, "joint": {"lr": 0.1, "batch_size": 500, "epochs": 50}},
    "cifar": {**_AUTHORS, "joint": {"lr": 0.1, "batch_size": 500, "epochs": 10}},
}
AUTHORS["mnist"]["ewc"] = {**_AUTHORS["ewc"], "num_fisher": 6000}
for _benchmark, _name in (("mnist", "lwf"), ("mnist", "agem"), ("mnist", "ewc"), ("cifar", "agem")):
    AUTHORS[_benchmark][_name] = {**AUTHORS[_benchmark][_name], "epochs": 1}

# ---------------------------------------------------------------------------------------------------------------- ablations

ABLATIONS: dict[str, Variant] = {
    "as the authors": {},
    "no permutation": {"groups": []},
    "no residual": {"residual": False},
    "no replay": {"memory_per_class": 0},
    "equal weighting": {"weighting": "equal"},
    "fusion as written": {"fusion": "paper"},
    "alpha 0": {"alpha": 0.0},
    "alpha 0.25": {"alpha": 0.25},
    "alpha 0.5": {"alpha": 0.5},
    "alpha 0.75": {"alpha": 0.75},
    "alpha 1": {"alpha": 1.0},
    "start at mass 0.9": {"noise": 0.0, "mass": 0.9},
    "gradient to rounding": {"solver_steps": 200},
    "5 rounds, 5 solver steps": {"num_iters": 5, "solver_steps": 5},
}

# -------------------------------------------------------------------------------------------------------------------- grids


def grid(**values: list[Any]) -> list[Variant]:
    """Every combination."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


# The batches and the first network of re-basin, so that nothing but the strategy differs.
_MNIST: Variant = {"batch_size": 500, "epochs": 5, "first_lr": 1e-3}
# One epoch per task after the first, for re-basin too.
_CIFAR: Variant = {"batch_size": 10, "epochs": 1, "first_epochs": 5, "first_lr": 1e-3}


def _extend(base: Variant, variants: list[Variant]) -> list[Variant]:
    return [{**base, **variant} for variant in variants]


# Clip, weight decay and weighting of the residual: the authors' first. The same for re-basin and for the residual alone.
_MNIST_RESIDUALS = [
    {"clip": clip, "decay": decay, "weighting": weighting}
    for clip, decay, weighting in (
        (1e-3, 0.1, "pooled"),
        (1e-3, 0.01, "pooled"),
        (1e-3, 0.01, "equal"),
        (3e-3, 0.01, "equal"),
        (3e-3, 0.1, "equal"),
        (None, 0.01, "equal"),
    )
]
_CIFAR_RESIDUALS = [
    {"lr": lr, "clip": clip, "decay": decay, "replay_size": replay, "weighting": "equal"}
    for lr, clip, decay, replay in (
        (0.5, 1e-3, 1e-4, 10),
        (0.5, 1e-3, 1e-4, 50),
        (0.05, None, 1e-3, 10),
        (0.05, None, 1e-3, 50),
    )
]
# With stored outputs: less decay, since they too hold the network.
_MNIST_RECALLS = [
    {"recall": recall, "clip": clip, "decay": decay, "weighting": "equal"}
    for recall in (0.5, 1.0)
    for clip, decay in ((1e-3, 0.1), (3e-3, 0.01), (None, 0.01), (None, 0.001))
]
_CIFAR_RECALLS = grid(recall=[0.05, 0.2], lr=[0.05, 0.2], clip=[None], decay=[1e-4], replay_size=[10], weighting=["equal"])
# Where the plans start: as the authors', or close to the identity.
_STARTS: list[Variant] = [{"noise": 0.1}, {"mass": 0.9}]


def _start_at(starts: list[Variant], variants: list[Variant]) -> list[Variant]:
    return [{**variant, **start} for variant, start in itertools.product(variants, starts)]


_MNIST_LATE = _start_at(
    _STARTS,
    [
        {"recall": recall, "clip": clip, "decay": 0.01, "weighting": "equal"}
        for recall in (0.25, 0.5)
        for clip in (3e-3, None)
    ],
)
# MC-SGD: the rate of the sequential network, and that on the lines. CLeWI: the rate of replay, and the old network's weight.
_CIFAR_CONNECTED = grid(lr=[0.03, 0.1], line_lr=[0.1, 0.3])
_MNIST_CONNECTED = grid(lr=[0.03, 0.1, 0.3], line_lr=[0.03, 0.1, 0.3])  # with momentum, a rate of 1 on the lines diverges
_MNIST_INTERPOLATED = grid(lr=[0.03, 0.1, 0.3, 1.0], alpha=[0.2, 0.3, 0.5, 0.7], weighting=["equal"])
_CIFAR_INTERPOLATED = grid(lr=[0.1, 0.3], alpha=[0.3, 0.5, 0.7], weighting=["equal"])
# Stable SGD has batches and a first network of its own: they are the method. Around what its authors report as working. On
# Rotated MNIST, MC-SGD has the same: one epoch of small batches, as its authors.
_SMALL_BATCHES: Variant = {"batch_size": 64, "epochs": 1, "momentum": 0.8}
_MNIST_STABLE = grid(lr=[0.03, 0.1, 0.3], gamma=[0.4, 0.55, 0.7, 0.85], dropout=[0.1, 0.25, 0.5])
_CIFAR_STABLE = grid(lr=[0.05, 0.15], gamma=[0.7, 0.85, 0.95])
TUNED: dict[str, list[tuple[str, str, list[Variant]]]] = {
    "mnist": [
        ("re-basin", "rebasin", _extend({**_MNIST, "noise": 0.1}, _MNIST_RESIDUALS)),
        ("residual alone", "rebasin", _extend({**_MNIST, "groups": []}, _MNIST_RESIDUALS)),
        ("re-basin, stored outputs", "rebasin", _extend({**_MNIST, "noise": 0.1}, _MNIST_RECALLS)),
        ("re-basin, stored outputs, late steps", "rebasin", _extend({**_MNIST, "share_after_fusion": 0.5}, _MNIST_LATE)),
        ("residual alone, stored outputs", "rebasin", _extend({**_MNIST, "groups": []}, _MNIST_RECALLS)),
        ("replay", "replay", _extend(_MNIST, grid(lr=[0.01, 0.03, 0.1], weighting=["pooled", "equal"]))),
        ("DER++", "derpp", _extend(_MNIST, grid(lr=[0.003, 0.01, 0.03, 0.1], alpha=[0.1, 0.25, 0.5, 1.0, 2.0]))),
        ("A-GEM", "agem", _extend(_MNIST, grid(lr=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0], replay_size=[256]))),
        ("EWC", "ewc", _extend(_MNIST, grid(lr=[0.0003, 0.001, 0.003, 0.01], strength=[1.0, 3.0, 10.0, 30.0, 100.0]))),
        ("LwF", "lwf", _extend(_MNIST, grid(lr=[0.003, 0.01, 0.03, 0.1], strength=[1.0, 3.0, 10.0, 30.0, 100.0]))),
        ("MC-SGD", "mcsgd", _extend(_SMALL_BATCHES, _MNIST_CONNECTED)),
        ("Stable SGD", "stable_sgd", _extend(_SMALL_BATCHES, _MNIST_STABLE)),
        ("CLeWI", "clewi", _extend(_MNIST, _MNIST_INTERPOLATED)),
        ("finetune", "finetune", _extend(_MNIST, grid(lr=[0.001, 0.003, 0.01, 0.03]))),
    ],
    "cifar": [
        ("re-basin", "rebasin", _extend({**_CIFAR, "mass": 0.9}, _CIFAR_RESIDUALS)),
        ("residual alone", "rebasin", _extend({**_CIFAR, "groups": []}, _CIFAR_RESIDUALS)),
        ("finetune", "finetune", _extend(_CIFAR, grid(lr=[0.01, 0.03, 0.1]))),
        ("LwF", "lwf", _extend(_CIFAR, grid(lr=[0.01, 0.03, 0.1], strength=[0.5, 2.0, 8.0, 32.0]))),
        ("A-GEM", "agem", _extend(_CIFAR, grid(lr=[0.001, 0.003, 0.01, 0.03, 0.1], replay_size=[50]))),
        (
            "EWC",
            "ewc",
            _extend(_CIFAR, grid(lr=[0.003, 0.01, 0.03], strength=[0.1, 1.0, 10.0, 100.0], num_fisher=[128])),
        ),
        ("MC-SGD", "mcsgd", _extend({**_CIFAR, "replay_size": 10}, _CIFAR_CONNECTED)),
        (
            "Stable SGD",
            "stable_sgd",
            _extend({"batch_size": 10, "epochs": 1, "first_epochs": 5, "momentum": 0.8, "dropout": 0.1}, _CIFAR_STABLE),
        ),
        ("CLeWI", "clewi", _extend({**_CIFAR, "replay_size": 10}, _CIFAR_INTERPOLATED)),
    ],
}
# Fronts: what trades accuracy for forgetting. On Rotated MNIST the grid of re-basin is what was ahead without a permutation:
# there the late steps do nothing, and a weight of one for the stored outputs was behind.
_MNIST_FRONT = grid(
    recall=[0.25, 0.5, 1.0],
    clip=[3e-3, None],
    decay=[0.001, 0.01],
    share_after_fusion=[0.25, 0.5, 0.75],
    weighting=["equal"],
)
_MNIST_REBASIN_FRONT = grid(
    recall=[0.25, 0.5],
    clip=[3e-3, None],
    decay=[0.001, 0.01],
    share_after_fusion=[0.5, 0.75],
    weighting=["equal"],
    mass=[0.9],
)
FRONTS: dict[str, list[tuple[str, str, list[Variant]]]] = {
    "mnist": [
        ("re-basin, stored outputs, late steps", "rebasin", _extend(_MNIST, _MNIST_REBASIN_FRONT)),
        ("residual alone, stored outputs", "rebasin", _extend({**_MNIST, "groups": []}, _MNIST_FRONT)),
        ("DER++", "derpp", _extend(_MNIST, grid(lr=[0.003, 0.01, 0.03, 0.1], alpha=[0.1, 0.25, 0.5, 1.0, 2.0, 4.0]))),
        ("replay", "replay", _extend(_MNIST, grid(lr=[0.003, 0.01, 0.03, 0.1], weighting=["pooled", "equal"]))),
    ],
    "cifar": [
        (
            "re-basin, stored outputs",
            "rebasin",
            _extend(
                _CIFAR,
                [*({**each, "mass": 0.99} for each in _CIFAR_RECALLS), {**_CIFAR_RESIDUALS[1], "recall": 0.1, "noise": 0.1}],
            ),
        ),
        (
            "re-basin, stored outputs, late steps",
            "rebasin",
            _extend({**_CIFAR, "share_after_fusion": 0.5, "mass": 0.99}, _CIFAR_RECALLS),
        ),
        ("residual alone, stored outputs", "rebasin", _extend({**_CIFAR, "groups": []}, _CIFAR_RECALLS)),
        (
            "DER++",
            "derpp",
            _extend(
                {**_CIFAR, "reset_norms": True},
                grid(lr=[0.03, 0.1, 0.3], alpha=[0.03, 0.1, 0.3], replay_size=[10]),
            ),
        ),
        (
            "replay",
            "replay",
            _extend({**_CIFAR, "reset_norms": True}, grid(lr=[0.03, 0.1, 0.3], replay_size=[10], weighting=["equal"])),
        ),
    ],
}
# Beyond the edges at which settings lie that were chosen, on validation data alone: stream, hidden layers, row, strategy.
BEYOND: list[tuple[str, int, str, str, list[Variant]]] = [
    (
        "cifar",
        1,
        "DER++",
        "derpp",
        _extend({**_CIFAR, "reset_norms": True, "replay_size": 10}, grid(lr=[0.03, 0.1], alpha=[1.0])),
    ),
    ("cifar", 1, "A-GEM", "agem", _extend(_CIFAR, grid(lr=[0.3], replay_size=[50]))),
    ("mnist", 1, "A-GEM", "agem", _extend(_MNIST, grid(lr=[0.3, 1.0], replay_size=[256]))),
    ("mnist", 2, "DER++", "derpp", _extend(_MNIST, grid(lr=[0.003], alpha=[0.5, 1.0, 2.0]))),
]
# What positive scales of units bring beside permutations, with the authors' settings and with those that validation chose.
# Each network is trained by itself, so that both rows of a pair have the same memories.
SCALED: dict[str, dict[str, Variant]] = {
    "mnist": {
        "as the authors": REBASIN_MNIST,
        "stored outputs, late steps": {
            **_MNIST, "share_after_fusion": 0.5, "recall": 0.5, "clip": None, "decay": 0.01, "weighting": "equal",
            "mass": 0.9,
        },
    },
    "cifar": {"one epoch": {**_CIFAR, **_CIFAR_RESIDUALS[0], "mass": 0.9}},
}  # fmt: skip
# Rows that are tuned for two hidden layers too.
_DEEPER = (
    "re-basin",
    "residual alone",
    "re-basin, stored outputs",
    "re-basin, stored outputs, late steps",
    "residual alone, stored outputs",
    "replay",
    "DER++",
)

# ------------------------------------------------------------------------------------------------------------------- trials


def list_trials(quick: bool) -> list[Trial]:
    """Every trial of the experiment, the most important first."""
    if quick:
        small = {"batch_size": 500, "epochs": 1}
        rows = [
            ("re-basin", "rebasin", [{**small, "noise": 0.1}]),
            ("gradient to rounding", "rebasin", [{**small, "noise": 0.1, "solver_steps": 200}]),
            ("replay", "replay", [{**small, "lr": lr, "first_lr": 1e-3} for lr in (0.03, 0.1)]),
        ]
        trials = [_trial("tuned", "mnist", row, name, variants, [0], num_tasks=3) for row, name, variants in rows]
        recalled = [{**small, "mass": mass, "recall": 0.5} for mass in (0.9, 0.99)]
        return [*trials, _trial("front", "mnist", "re-basin, stored outputs", "rebasin", recalled, [0], 3)]
    trials = [
        _trial("rebasin", "cifar", "all permuted", "rebasin", [REBASIN_CIFAR]),
        # They permuted linear layers only, and this network has no hidden one.
        _trial("rebasin", "cifar", "as the authors", "rebasin", [{**REBASIN_CIFAR, "groups": []}]),
    ]
    for row, layers in itertools.product(("as the authors", "no permutation"), (1, 2)):
        trials.append(_trial("rebasin", "mnist", row, "rebasin", [{**REBASIN_MNIST, **ABLATIONS[row]}], layers=layers))
    for benchmark in ("cifar", "mnist"):
        trials += [_trial("authors", benchmark, name, name, [variant]) for name, variant in AUTHORS[benchmark].items()]
        trials += [_trial("tuned", benchmark, row, name, variants) for row, name, variants in TUNED[benchmark]]
        trials += [_trial("front", benchmark, row, name, variants) for row, name, variants in FRONTS[benchmark]]
    trials += [
        _trial("tuned", "mnist", row, name, variants, layers=2) for row, name, variants in TUNED["mnist"] if row in _DEEPER
    ]
    for row in list(ABLATIONS)[2:]:
        trials.append(_trial("rebasin", "mnist", row, "rebasin", [{**REBASIN_MNIST, **ABLATIONS[row]}]))
    # Five examples of a class are chance: what a permutation does is less than what they do.
    for first, row in itertools.product(range(0, 20, 5), ("as the authors", "no permutation")):
        seeds = list(range(first, first + 5))
        trials.append(_trial("seeds", "mnist", row, "rebasin", [{**REBASIN_MNIST, **ABLATIONS[row]}], seeds))
    for benchmark, settings in SCALED.items():
        for row, variant in settings.items():
            trials.append(_trial("kinds", benchmark, row, "rebasin", [variant], kinds="permutation"))
            trials.append(_trial("kinds", benchmark, f"{row}, with scales", "rebasin", [variant], kinds="positive"))
    for benchmark, layers, row, name, variants in BEYOND:
        trials.append({**_trial("beyond", benchmark, row, name, variants, layers=layers), "seeds": []})
    return trials + _cost_trials("mnist") + _cost_trials("cifar")


def _trial(
    stage: str,
    benchmark: str,
    row: str,
    strategy: str,
    variants: list[Variant],
    seeds: list[int] | None = None,
    num_tasks: int = 20,
    layers: int = 1,
    kinds: str = "",
) -> Trial:
    trial = {"stage": stage, "benchmark": benchmark, "row": row, "strategy": strategy, "num_tasks": num_tasks}
    trial |= {"kinds": kinds} if kinds else {}  # a trial is known by its entries, and earlier ones have none
    return {**trial, "layers": layers, "seeds": seeds or SEEDS, "variants": variants}


def _cost_trials(benchmark: str) -> list[Trial]:
    size, epochs = (500, 5) if benchmark == "mnist" else (10, 1)
    variant = {"batch_size": size, "epochs": epochs, "first_epochs": 1, "replay_size": size}
    rows: list[tuple[str, str, Variant]] = [
        ("replay", "replay", {}),
        ("rebasin", "rebasin", {}),
        ("rebasin, gradient to rounding", "rebasin", {"solver_steps": 200}),
        ("rebasin, 5 rounds, 5 solver steps", "rebasin", {"num_iters": 5, "solver_steps": 5}),
        ("rebasin, residual alone", "rebasin", {"groups": []}),
        *((name, name, {}) for name in ("finetune", "derpp", "agem")),
    ]
    trials = [
        {**_trial("cost", benchmark, row, name, [{**variant, **extra}], [0], num_tasks=2), "capture": capture}
        for capture in (True, False)
        for row, name, extra in rows
    ]
    return [trial for trial in trials if trial["capture"] or trial["row"] in ("replay", "rebasin")]
