"""Continual learning (Table 3): Rotated MNIST and Split CIFAR-100, re-basin and its competitors.

A trial is one row of a table: a strategy on several seeds, side by side on the device. The stages are "rebasin" (the
authors' settings, and without its parts), "tuned" (the best of a grid on validation data), "authors" (baselines with their
settings), "front" (accuracy against forgetting), "seeds" (with the permutation and without it, on twenty seeds), "kinds"
(with scales beside permutations), "beyond" (settings beyond the edges of grids, on validation data alone) and "cost" (time
and memory of a step).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from experiments import continual_drawing, continual_tables
from experiments.continual_networks import ResNet18, StackedMLP, make_mlp
from experiments.continual_settings import LIMITS, TUNING, Variant, list_trials
from onebasin import continual
from onebasin.continual import AccuracyMatrix
from onebasin.tracing import Kinds

STRATEGIES: dict[str, Callable[..., continual.Strategy]] = {
    "finetune": continual.Finetune,
    "ewc": continual.EWC,
    "lwf": continual.LwF,
    "agem": continual.AGEM,
    "replay": continual.Replay,
    "derpp": continual.DERPlusPlus,
    "joint": continual.Joint,
    "mcsgd": continual.MCSGD,
    "stable_sgd": continual.StableSGD,
    "clewi": continual.CLeWI,
    "rebasin": continual.RebasinStrategy,
}


def configs(quick: bool) -> list[dict[str, Any]]:
    """All trials, the most important first."""
    return list_trials(quick)


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """A row of a table: the setting, chosen if there are several, and its accuracy matrix on every seed.

    A failure is a result too: other trials that share the device go on.
    """
    gc.collect()
    gc.freeze()  # collections before each capture would look at every module again
    try:
        return _run_cost(config, device) if config["stage"] == "cost" else _run_trial(config, device)
    except (RuntimeError, ValueError):
        return {"error": traceback.format_exc()}


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Tables and figures."""
    continual_tables.draw(records, folder)
    continual_drawing.draw(continual_tables.drop_superseded(records), folder)


def _run_trial(config: dict[str, Any], device: str) -> dict[str, Any]:
    begin = time.perf_counter()
    variant, tuning = config["variants"][0], []
    if len(config["variants"]) > 1 or not config["seeds"]:
        on = TUNING[config["benchmark"]]
        stream = _make_stream(config["benchmark"], True, device).first(min(on.num_tasks, config["num_tasks"]))
        tuning = _run_side_by_side(config, config["variants"], on.seeds, stream, device)
        tuning = [run for run in tuning if len(run["rows"]) == len(stream)]
        variant = choose(tuning)
    if not config["seeds"]:
        return {"tuning": tuning, "seconds": round(time.perf_counter() - begin, 2)}
    stream = _make_stream(config["benchmark"], False, device).first(config["num_tasks"])
    limits = {limit: choose(tuning, limit) for limit in LIMITS[config["benchmark"]] if config["stage"] == "front"}
    found = {  # a setting that is chosen twice runs once
        str(each): _run_side_by_side(config, [each], config["seeds"], stream, device)
        for each in {str(each): each for each in (variant, *limits.values()) if each is not None}.values()
    }
    result: dict[str, Any] = {"runs": found[str(variant)], "tuning": tuning}
    if config["stage"] == "front":
        result["front"] = [{"limit": limit, "runs": found[str(each)]} for limit, each in limits.items() if each is not None]
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
    return {**result, "seconds": round(time.perf_counter() - begin, 2), "peak_memory": peak}


def choose(tuning: list[dict[str, Any]], limit: float = 1.0) -> Variant | None:
    """The setting with the best mean accuracy among those that forget at most this much; None if there is none."""
    matrices = [(run["variant"], AccuracyMatrix(run["rows"])) for run in tuning]
    allowed = [(variant, matrix.average) for variant, matrix in matrices if matrix.forgetting <= limit]
    return max(allowed, key=lambda each: each[1])[0] if allowed else None


def _run_side_by_side(
    config: dict[str, Any], variants: list[Variant], seeds: list[int], stream: continual.Stream, device: str
) -> list[dict[str, Any]]:
    """Every variant on every seed: the seeds of a small network stacked into one, everything else on streams."""
    stacks = [seeds] if _is_stacked(config) else [[seed] for seed in seeds]
    chosen = [(variant, stack) for variant in variants for stack in stacks]
    strategies = [make_strategy(config, variant, stack, device) for variant, stack in chosen]
    rows: list[list[Tensor]] = [[] for _ in chosen]
    continual.interleave([_follow(s, stream, found) for s, found in zip(strategies, rows, strict=True)], device)
    return [
        {
            "variant": variant,
            "seed": seed,
            "rows": [[round(value, 5) for value in row.view(-1, len(stack))[:, member].tolist()] for row in found],
            "moved": [round(entry["moved"], 4) for entry in strategy.history],
        }
        for (variant, stack), strategy, found in zip(chosen, strategies, rows, strict=True)
        for member, seed in enumerate(stack)
    ]


def _follow(strategy: continual.Strategy, stream: continual.Stream, rows: list[Tensor]) -> Iterator[None]:
    """Learn a stream in portions, keeping the accuracies; joint training learns once, when it has everything."""
    if isinstance(strategy, continual.Joint):
        for task in stream.train[:-1]:
            strategy.gather(task)
    try:
        for row in continual.learn_stream(strategy, stream):
            if row is not None:
                rows.append(row)
            yield None
    except ValueError as error:  # it diverged
        print(f"{type(strategy).__name__} gave up after {len(rows)} tasks: {error}", file=sys.stderr)


def make_strategy(config: dict[str, Any], variant: Variant, seeds: list[int], device: str) -> continual.Strategy:
    """The strategy of a run, from plain values; with several seeds, of as many networks in one."""
    dropout = variant.get("dropout", 0.0)
    kinds = config.get("kinds", "permutation")
    model, symmetry = _make_model(config["benchmark"], config["layers"], tuple(seeds), _is_stacked(config), dropout, kinds)
    capture = device.startswith("cuda") and "ONEBASIN_EAGER" not in os.environ
    options = {**variant, "seed": seeds[0], "members": len(seeds), "capture": capture}
    lr, momentum = options.pop("lr", None), options.pop("momentum", 0.0)
    decay, plan_lr, first_lr = options.pop("decay", None), options.pop("plan_lr", None), options.pop("first_lr", None)
    if first_lr is not None:
        options["first_optimizer"] = continual.adam(first_lr)
    if "line_lr" in options:
        options["line_optimizer"] = continual.sgd(options.pop("line_lr"), momentum=momentum)
    name = config["strategy"]
    if name != "rebasin":
        options["optimizer"] = continual.sgd(lr or 0.1, momentum=momentum, weight_decay=decay or 0.0)
        given = {"symmetry": symmetry} if name == "clewi" else {}
        return STRATEGIES[name](model.to(device), **given, **options)
    delta = {"lr": 0.05 if lr is None else lr, "weight_decay": 0.1 if decay is None else decay, "momentum": momentum}
    options["optimizer"] = continual.sgd(**delta)
    options["plan_optimizer"] = continual.adam(plan_lr or 0.1)
    return continual.RebasinStrategy(model.to(device), symmetry, **options)


def _is_stacked(config: dict[str, Any]) -> bool:
    """Whether the seeds of a trial are one network. Activation matching and scales need each by itself, traced.

    The seeds of a stack share the generator of their memories, so a network by itself has other examples.
    """
    return config["benchmark"] == "mnist" and config["strategy"] != "clewi" and "kinds" not in config


def _make_model(
    benchmark: str, layers: int, seeds: tuple[int, ...], stacked: bool, dropout: float, kinds: Kinds
) -> tuple[nn.Module, ob.Symmetry]:
    networks: list[nn.Module] = []
    for seed in seeds:
        torch.manual_seed(seed)
        networks.append(make_mlp(layers) if benchmark == "mnist" else ResNet18(dropout=dropout))
    if stacked:
        stack = StackedMLP(networks, dropout)
        return stack, stack.symmetry()
    return networks[0], _trace(benchmark, layers, kinds)


@functools.cache
def _trace(benchmark: str, layers: int, kinds: Kinds) -> ob.Symmetry:
    if benchmark == "mnist":
        return ob.symmetry(make_mlp(layers), torch.rand(2, 1, 28, 28), kinds=kinds)
    return ob.symmetry(ResNet18(), torch.rand(2, 3, 32, 32), kinds=kinds)


@functools.cache
def _make_stream(benchmark: str, validation: bool, device: str) -> continual.Stream:
    if benchmark == "mnist":
        return continual.rotated_mnist(validation=validation, device=device)
    seed = TUNING["cifar"].class_seed if validation else None
    return continual.split_cifar100(validation=validation, device=device, seed=seed)


def _run_cost(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The time of a step on a second task, alone on the device, and the peak of its memory."""
    stream = _make_stream(config["benchmark"], False, device).first(2)
    strategy = make_strategy(config, config["variants"][0], [0], device)
    strategy.capture = strategy.capture and config["capture"]
    strategy.fit(stream.train[0])
    task = stream.train[1]  # made now, or rotating its images would be part of the peak
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before, marks = torch.cuda.memory_allocated() if cuda else 0, []
    for done in strategy.learn(task):
        if cuda:
            torch.cuda.synchronize()
        marks.append((done, time.perf_counter()))
    (start, begin), (stop, end) = marks[0], marks[-1]
    return {
        "milliseconds": 1000 * (end - begin) / (stop - start),
        "peak_memory": torch.cuda.max_memory_allocated() - before if cuda else None,
        "captured": strategy.capture,
    }
