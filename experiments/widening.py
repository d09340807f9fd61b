"""Networks of different widths that were trained apart: the narrow one is widened and aligned to the wide one.

The networks are those of the experiments "porting" (a ViT on half of the classes of CIFAR-100, a GPT) and "deep", and wider
ones by the same recipes: a ViT with one and a half times as many heads, units and channels, a GPT and a VGG11 with twice as
many.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from experiments import anchor_networks, deep, porting, transformer_networks
from experiments.transformers import Line, Shuffled, evaluate

METHODS = {
    "widened": "widened alone",
    "permutations": "permutations, by weights (no data)",
    "wm": "all kinds, by weights (no data)",
    "am": "all kinds, by activations",
    "learned": "all kinds, learned",
}
VGG_METHODS = {"widened": "naive", "permutations": "wm", "am": "am", "learned": "am+scales"}
"""What these are in the experiment "deep": activations move units alone, and what is learned are scales."""
_GPT, _VIT, _VGG = porting.NETWORKS["gpt"], porting.NETWORKS["vit"], anchor_networks.RECIPES["vgg11"]
RECIPES: dict[str, tuple[Any, Any]] = {
    "vit": (_VIT, replace(_VIT, width=384, num_heads=12, hidden=768)),
    "gpt": (_GPT, replace(_GPT, width=512, num_heads=8, hidden=2048)),
    "vgg11": (_VGG, replace(_VGG, width=2)),
}
"""Of the narrow and the wide network."""
NUM_POINTS = 11


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is a narrow network, a wide one, and one way to align them."""
    return [
        {"network": network, "narrow": narrow, "wide": wide, "method": method, "steps": 5 if quick else 500, "quick": quick}
        for network in (("gpt",) if quick else RECIPES)
        for narrow, wide in ((0, 0), (1, 1), (2, 2))[: 1 if quick else 3]
        for method in (VGG_METHODS if network == "vgg11" else METHODS)
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Widen and align the narrow network, and measure the line to the wide one on test data."""
    if config["network"] == "vgg11":
        narrow, wide = (
            anchor_networks.trained_networks(recipe, [config[name]], device)[0]
            for recipe, name in zip(RECIPES["vgg11"], ("narrow", "wide"), strict=True)
        )
        example = anchor_networks.load_images("train", device)[0][:2]
        method = {"method": VGG_METHODS[config["method"]]}
        return deep.measure_pair(method, wide, ob.widen(narrow, like=wide, example_inputs=example), device)
    recipes = RECIPES[config["network"]]
    if config["quick"]:
        small = replace(recipes[0], width=32, num_blocks=1, num_heads=2, hidden=32, steps=20, batch=8, context=16)
        recipes = small, replace(small, width=48, num_heads=3, hidden=48)
    narrow, wide = (
        porting.trained_base(recipe, config[name], device) for recipe, name in zip(recipes, ("narrow", "wide"), strict=True)
    )
    task = porting.load_task(recipes[0], device, None)
    train, test = task["train"], task["test"]
    size = 64 if config["network"] == "gpt" else 500
    batches = list(zip(*(part[: 100 * size].split(size) for part in train), strict=True))
    begin = time.perf_counter()
    first, second = _align(config, narrow, wide, batches)
    seconds = time.perf_counter() - begin
    result: dict[str, Any] = {"seconds": seconds}
    for name, (inputs, targets) in {"train": batches[0], "test": test}.items():
        path = ob.linear_path(first, second, lambda m, x=inputs, y=targets: evaluate(m, x, y), NUM_POINTS)
        result[name] = {"weights": path.weights, "barrier": path.barrier, **path.metrics}
    return result


def _align(
    config: dict[str, Any], narrow: nn.Module, wide: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, nn.Module]:
    method, example = config["method"], batches[0][0][:2]
    if method == "widened":
        return wide, ob.widen(narrow, like=wide, example_inputs=example)
    options: dict[str, Any] = {"example_inputs": example, "method": "weight-matching"}
    if method != "permutations":
        options |= {"kinds": "all", "scaling": ob.Scaling(steps=config["steps"] if method == "learned" else 0)}
    if method in ("am", "learned"):
        options |= {"method": ob.ActivationMatching(num_batches=20), "data": batches}
    if method == "learned":
        line = Line(transformer_networks.loss, low=0.4, high=0.6)
        options |= {"objective": line, "data": Shuffled(batches)}
    torch.manual_seed(0)
    found = ob.align(narrow, to=wide, **options)
    return found.target, found.model


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """One table: a row per network and method."""
    lines = [
        "# A narrow and a wide network that were trained apart",
        "",
        "Test barrier on the line between them, and midpoint accuracy. Statistics of VGG11 are corrected on training",
        "images, and its barrier is the highest of three points.",
        "",
        "| network | method | ends, wide and narrow | test barrier | each pair | midpoint accuracy | seconds |",
        "|---" * 7 + "|",
    ]
    for network in RECIPES:
        for method, label in METHODS.items():
            same = [r["result"] for r in records if (r["config"]["network"], r["config"]["method"]) == (network, method)]
            if not same:
                continue
            ends, barriers, middles = zip(*(_summarise(result) for result in same), strict=True)
            cells = [network, label, f"{fmean(e[0] for e in ends):.2%}, {fmean(e[1] for e in ends):.2%}"]
            cells += [f"{fmean(barriers):.3f}", ", ".join(f"{value:.3f}" for value in barriers), f"{fmean(middles):.2%}"]
            lines.append(f"| {' | '.join(cells)} | {fmean(result['seconds'] for result in same):.0f} |")
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "widening.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _summarise(result: dict[str, Any]) -> tuple[tuple[float, float], float, float]:
    """Accuracy of the ends, the barrier, and the midpoint accuracy."""
    if "ends" not in result:
        accuracy = result["test"]["accuracy"]
        return (accuracy[0], accuracy[-1]), result["test"]["barrier"], accuracy[NUM_POINTS // 2]
    first, second = result["ends"]
    above = [
        result[f"at {weight}"]["loss"] - (1 - weight) * first["loss"] - weight * second["loss"]
        for weight in (0.25, 0.5, 0.75)
    ]
    return (first["accuracy"], second["accuracy"]), max(0.0, *above), result["at 0.5"]["accuracy"]
