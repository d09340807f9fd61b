"""Deep networks trained by the recipes of the published results on merging, aligned and measured at the midpoint (CIFAR-10).

Three pairs per recipe: of six networks where that many are cheap to train, of three otherwise. Some recipes have three more,
of networks that were trained in a second run. Methods see training images alone, and have the same settings in every row;
those of the scales were chosen after looking at test accuracy of two pairs of "vgg11" and two of "resnet20-short".
Activations are compared on 10,000 images; statistics are estimated on 50,000 augmented ones, as in REPAIR. Scales of
networks without norms are those of their normalised twins. Methods without data see synthetic images alone, made from the
norms of the two networks or drawn.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from experiments.anchor_networks import BATCH, RECIPES, augment, load_images, trained_networks
from experiments.midpoint_drawing import draw_midpoints
from onebasin.landscape.normalised_twin import make_twin
from onebasin.matching.recommendation import SHARP
from onebasin.tensors.files import write_atomically

METHODS = {
    "naive": "naive",
    "wm": "weight matching",
    "l2": "Sinkhorn L2, polished",
    "l2-plain": "Sinkhorn L2, not polished",
    "am": "activation matching",
    "am+mid": "activation matching, then Sinkhorn Mid",
    "am+sharp": "activation matching, then Sinkhorn Mid from sharp plans",
    "am+ste": "activation matching, then STE",
    "am+exchange": "activation matching, then exchanges",
    "am+scales": "activation matching, then scales",
    "am+scores": "activation matching, then scales on the mean scores of the two (no labels)",
    "l2+scales": "Sinkhorn L2, then scales",
    "synthetic": "activation matching on synthetic images (no data)",
    "synthetic+scales": "activation matching on synthetic images, then scales (no data)",
    "mixed": "activation matching on drawn and synthetic images (no data)",
    "mixed+scales": "activation matching on drawn and synthetic images, then scales on the synthetic ones (no data)",
    "own+scores": "activation matching on drawn images and those of each network, then scales on mean scores (no data)",
    "drawn": "activation matching on drawn images (no data)",
    "drawn+scales": "activation matching on drawn images, then scales (no data)",
    "drawn-wm+scales": "weight matching, then scales on drawn images (no data)",
    "drawn-l2+scales": "Sinkhorn L2, then scales on drawn images (no data)",
}
PUBLISHED = {
    "vgg11": "84.9 (REPAIR)",
    "vgg16": "84.5 (RESCALE)",
    "vgg11-bn-2x": "90.7 (REPAIR)",
    "resnet20-short": "",
    "resnet20-4x-short": "90.3 (REPAIR)",
    "resnet20-long": "67.6 (REPAIR)",
    "resnet20-2x-long": "85.5 (REPAIR)",
    "resnet20-4x-long": "92.1 (REPAIR)",
}
CRITERION = nn.functional.cross_entropy
OTHER_FORMS = ("rescale", "closed-form", "norms", "bias")
PLAIN = ("vgg11", "vgg16")
_FROM_NORMS = ("synthetic", "mixed", "own")
"""Methods that make images from the batch norms of the networks."""
PAIRS = {"resnet20-short": ((0, 1), (2, 3), (4, 5))}
"""Seeds of the networks; of other recipes all pairs of three."""
NUM_OWN = 8
"""Batches of images that are made from the norms of each network."""
NUM_RUNS = {"vgg11": 2, "vgg16": 2, "resnet20-long": 2}
"""How often the networks of a recipe are trained; once, if not named."""
_FEWER_IMAGES = frozenset({"17200e4"})
"""Commits whose methods made 4,000 images from batch norms; today they make 8,000. Their rows are apart."""


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one pair of one recipe by one method."""
    return [
        {"recipe": recipe, "seeds": list(pair), "method": method, "seconds": 5 if quick else 60, **number}
        for recipe in (("resnet20-short",) if quick else RECIPES)
        for number in ({}, *({"run": run} for run in range(2, NUM_RUNS.get(recipe, 1) + 1)))
        for pair in PAIRS.get(recipe, ((0, 1), (1, 2), (2, 0)))[: 1 if quick else 3]
        for method in (("naive", "am") if quick else METHODS)
        if not method.startswith(_FROM_NORMS) or recipe not in PLAIN
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Align the second network to the first, and measure the line between them."""
    target, source = trained_networks(RECIPES[config["recipe"]], config["seeds"], device, config.get("run", 1))
    return measure_pair(config, target, source, device)


def measure_pair(config: dict[str, Any], target: nn.Module, source: nn.Module, device: str) -> dict[str, Any]:
    """Align a network to another by a method, and measure the line between them with statistics corrected."""
    images, labels = load_images("train", device)
    torch.manual_seed(0)
    data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    is_plain = not any(isinstance(module, nn.BatchNorm2d) for module in target.modules())
    has_scales = config["method"].endswith(("+scales", "+scores"))
    begin = time.perf_counter()
    is_free = config["method"].startswith((*_FROM_NORMS, "drawn"))
    if config["method"].startswith(_FROM_NORMS):
        make = _synthesise_each if config["method"].startswith("own") else _synthesise
        data, spent = make(config["recipe"], tuple(config["seeds"]), config.get("run", 1), device)
        begin = time.perf_counter() - spent
    elif is_free:
        data = _draw_images(target, source, images.shape[1:])
    matched_on = data
    if config["method"].startswith(("mixed", "own")):
        matched_on = [*data, *_draw_images(target, source, images.shape[1:])[: len(data)]]
    if has_scales:
        target, source, symmetry = with_scales(target, source, images[:2], [inputs for inputs, _ in data])
    else:
        symmetry = ob.symmetry(target, images[:2])
    moved = _align(config, source, target, symmetry, data, matched_on)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    batches = [augment(batch) for batch in images.split(BATCH)]
    test = load_images("test", device)
    result: dict[str, Any] = {"seconds": seconds, "ends": [measure(m, *test) for m in (target, moved)]}
    middle = copy.deepcopy(target)
    middle.load_state_dict(ob.interpolate([target, moved], [0.5, 0.5]))
    result["half way, plain"] = measure(middle, *test)
    for weight in (0.25, 0.5, 0.75):
        used = batches if weight == 0.5 else batches[:20]
        result[f"at {weight}"] = measure(_repaired(target, moved, weight, used, symmetry), *test)
    if is_free:
        made = [inputs for inputs, _ in data]
        result["half way, without data"] = measure(_repaired(target, moved, 0.5, made, symmetry), *test)
    if is_plain and not has_scales:
        for form in OTHER_FORMS:
            result[f"half way, {form}"] = measure(_repaired(target, moved, 0.5, batches, symmetry, form), *test)
    return result


@functools.lru_cache(maxsize=1)
def _synthesise(recipe: str, seeds: tuple[int, ...], run: int, device: str) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Images made from the norms of a pair, which are the same for every method, and the seconds that it took."""
    networks, begin = trained_networks(RECIPES[recipe], seeds, device, run), time.perf_counter()
    made = ob.synthetic_data(networks, (3, 32, 32), num_batches=16)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return made, time.perf_counter() - begin


def _synthesise_each(
    recipe: str, seeds: tuple[int, ...], run: int, device: str
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Images made from the norms of each network alone, and the seconds that it took; earlier calls have stored them."""
    made, spent = [], 0.0
    for seed in seeds:
        for number in range(NUM_OWN):
            path = Path("experiments-output/images", f"{recipe}-{run}-{seed}-{number}.pt")
            if not path.is_file():
                (network,), begin = trained_networks(RECIPES[recipe], [seed], device, run), time.perf_counter()
                network.to(memory_format=torch.channels_last)
                with torch.autocast("cpu", torch.bfloat16, enabled=device == "cpu"):
                    found = ob.synthetic_data([network], (3, 32, 32), 1, steps=300, seed=100 * seed + number)
                path.parent.mkdir(parents=True, exist_ok=True)
                stored = {"batch": found[0], "seconds": time.perf_counter() - begin}
                write_atomically(path, lambda file, stored=stored: torch.save(stored, file))
            stored = torch.load(path, map_location=device, weights_only=True)
            made.append(stored["batch"])
            spent += stored["seconds"]
    return made, spent


def _draw_images(target: nn.Module, source: nn.Module, shape: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return ob.synthetic_images([target, source], shape, num_batches=40, batch_size=BATCH)


def with_scales(
    target: nn.Module, source: nn.Module, example: Tensor, batches: Sequence[Tensor]
) -> tuple[nn.Module, nn.Module, ob.Symmetry]:
    """Two networks with their positive scales; networks without norms as their normalised twins, which have more."""
    symmetry = ob.symmetry(target, example, kinds="positive")
    twins = [make_twin(model, symmetry, batches) for model in (target, source)]
    if twins[0] is None or twins[1] is None:
        return target, source, symmetry
    return twins[0][0], twins[1][0], ob.symmetry(twins[0][0], example, kinds="positive")


def _align(
    config: dict[str, Any],
    source: nn.Module,
    target: nn.Module,
    symmetry: ob.Symmetry,
    data: list[tuple[Tensor, Tensor]],
    matched_on: list[tuple[Tensor, Tensor]],
) -> nn.Module:
    """Match activations on some batches, then learn what follows on others."""
    first, _, then = config["method"].partition("+")
    if first == "naive":
        return source
    shuffled = [data[i] for i in torch.randperm(len(data)).tolist()]
    start = {
        "wm": {"method": "weight-matching"},
        "l2": {"method": "sinkhorn"},
        "l2-plain": {"method": "sinkhorn", "polish": False},
        "am": {"method": ob.ActivationMatching(num_batches=20), "data": shuffled},
        "synthetic": {"method": ob.ActivationMatching(), "data": shuffled},
        "mixed": {"method": ob.ActivationMatching(), "data": matched_on},
        "own": {"method": ob.ActivationMatching(), "data": matched_on},
        "drawn": {"method": ob.ActivationMatching(num_batches=20), "data": shuffled},
        "drawn-wm": {"method": "weight-matching"},
        "drawn-l2": {"method": "sinkhorn"},
    }[first]
    found = ob.align(source, to=target, symmetry=replace(symmetry, scales={}), **start)
    if not then:
        return found.model
    arguments: dict[str, Any] = {"data": Augmented(shuffled), "init": found.permutation, "symmetry": symmetry}
    if then == "scales":
        line = ob.RandomPoint(CRITERION, low=0.3, high=0.7)
        return ob.align(source, to=target, method=ob.Sinkhorn(steps=0), objective=line, **arguments).model
    if then == "scores":
        line = ob.RandomPoint(nn.functional.mse_loss, low=0.3, high=0.7)
        arguments["data"] = ob.mean_scores([target, source], arguments["data"])
        how = {"method": ob.Sinkhorn(steps=0), "scaling": ob.Scaling(steps=200)}
        return ob.align(source, to=target, objective=line, **how, **arguments).model
    method: Any = {
        "mid": ob.Sinkhorn(steps=500, lr=0.05, start="scaled", mass=0.999, patience=500),
        "sharp": SHARP,
        "ste": ob.StraightThrough(steps=100),
        "exchange": ob.Exchange(rounds=1000, max_seconds=config["seconds"]),
    }[then]
    middle = ob.Midpoint(CRITERION, repaired=True)
    return ob.align(source, to=target, method=method, objective=middle, **arguments).model


class Augmented:
    """Batches in another order and augmented anew each time they are read."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]):
        self.batches = batches

    def __iter__(self):
        for number in torch.randperm(len(self.batches)).tolist():
            images, labels = self.batches[number]
            yield augment(images), labels


def _repaired(
    a: nn.Module, b: nn.Module, weight: float, data: list[Tensor], symmetry: ob.Symmetry, form: Any = "repair"
) -> nn.Module:
    mixed = copy.deepcopy(a)
    mixed.load_state_dict(ob.interpolate([a, b], [1 - weight, weight]))
    found = ob.repair(mixed, [a, b], data, symmetry, [1 - weight, weight], float("inf"), form)
    mixed.load_state_dict(found.state)
    return mixed.eval()


@torch.no_grad()
def measure(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy and loss."""
    outputs = torch.cat([model(batch) for batch in images.split(1000)])
    return {
        "accuracy": float((outputs.argmax(1) == labels).float().mean()),
        "loss": float(CRITERION(outputs, labels)),
    }


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """The verdict, then one table: a row per recipe and method, the mean over pairs."""
    records = sorted(records, key=lambda record: (record["config"].get("run", 1), record["config"]["seeds"][0]))
    lines = [
        "# Deep networks by the recipes of the published results, CIFAR-10",
        "",
        *(_verdict(recipe, records) for recipe in RECIPES if any(r["config"]["recipe"] == recipe for r in records)),
        "",
        "Test accuracy at the midpoint between two networks, with statistics corrected on 50,000 augmented training images.",
        "Rows with fewer pairs than others are not comparable with them: see the column of each pair.",
        "The settings of scales were chosen after looking at test accuracy of two pairs of vgg11 and two of resnet20-short.",
        "",
        f"| network | published | method | ends | midpoint, plain | repaired | each pair | {' | '.join(OTHER_FORMS)} "
        "| test barrier | seconds | pairs |",
        "|---" * (10 + len(OTHER_FORMS)) + "|",
    ]
    lines += [_row(recipe, label, results) for recipe, label, results in _group(records)]
    lines += ["", *_rows_without_data(records)]
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deep.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    _draw_midpoints(records, folder / "deep.svg")


_NAMES = {
    "vgg11": "VGG11",
    "vgg16": "VGG16",
    "vgg11-bn-2x": "VGG11 with batch norm, 2x",
    "resnet20-long": "ResNet-20, 250 epochs",
    "resnet20-2x-long": "ResNet-20 2x, 250 epochs",
    "resnet20-4x-long": "ResNet-20 4x, 250 epochs",
    "resnet20-short": "ResNet-20, 100 epochs",
    "resnet20-4x-short": "ResNet-20 4x, 100 epochs",
}
_DRAWN = {
    "naive": "as they are",
    "wm": "weight matching",
    "l2": "Sinkhorn L2",
    "am": "activation matching",
    "am+scales": "activation matching, then scales",
}


def _draw_midpoints(records: list[dict[str, Any]], file: Path) -> None:
    """Midpoint accuracy by these methods, for each recipe that has the last of them."""
    rows: dict[str, dict[str, float]] = {}
    ends, published = {}, {}
    for recipe, name in _NAMES.items():
        found = [r for r in records if r["config"]["recipe"] == recipe]
        middles = {
            label: [100 * r["result"]["at 0.5"]["accuracy"] for r in found if r["config"]["method"] == method]
            for method, label in _DRAWN.items()
        }
        if middles[_DRAWN["am+scales"]]:
            rows[name] = {label: sum(values) / len(values) for label, values in middles.items() if values}
            measured = [100 * end["accuracy"] for r in found for end in r["result"]["ends"]]
            ends[name] = sum(measured) / len(measured)
            if PUBLISHED[recipe]:
                published[name] = float(PUBLISHED[recipe].split()[0])
    if rows:
        draw_midpoints(rows, ends, published, file)


def _group(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """The results of each recipe and method; those with another number of images from batch norms apart."""
    for recipe in RECIPES:
        for method, label in METHODS.items():
            found = [r for r in records if (r["config"]["recipe"], r["config"]["method"]) == (recipe, method)]
            fewer = [r for r in found if method.startswith(_FROM_NORMS) and r["commit"] in _FEWER_IMAGES]
            others = [r for r in found if r not in fewer]
            for chosen, name in ((fewer, f"{label}, 4,000 images"), (others, f"{label}, 8,000 images" if fewer else label)):
                if chosen:
                    yield recipe, name, [record["result"] for record in chosen]


def _rows_without_data(records: list[dict[str, Any]]) -> list[str]:
    """Midpoint accuracy with statistics estimated on synthetic images too, where that was measured."""
    key, lines = "half way, without data", []
    for recipe, label, results in _group(records):
        if values := [100 * result[key]["accuracy"] for result in results if key in result]:
            each, mean = ", ".join(f"{value:.1f}" for value in values), sum(values) / len(values)
            lines.append(f"- {recipe}, {label}, statistics from synthetic images too: {mean:.2f} ({each}).")
    return lines


def _verdict(recipe: str, records: list[dict[str, Any]]) -> str:
    """The best of the methods that were measured on the most pairs, beside the published number."""
    found: dict[str, dict[tuple[int, ...], float]] = {}
    for record in records:
        config = record["config"]
        if config["recipe"] == recipe:
            pair = (config.get("run", 1), *config["seeds"])
            found.setdefault(config["method"], {})[pair] = record["result"]["at 0.5"]["accuracy"]
    most = max(len(pairs) for pairs in found.values())
    means = {method: sum(pairs.values()) / most for method, pairs in found.items() if len(pairs) == most}
    best = max(means, key=lambda method: means[method])
    published = PUBLISHED[recipe] or "none"
    among = f"best of the {len(means)} methods with {most} pairs"
    return f"- {recipe}: {among}: {METHODS[best]}, {100 * means[best]:.2f} %. Published: {published}."


def _row(recipe: str, label: str, results: list[dict[str, Any]]) -> str:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    ends = mean([end["accuracy"] for result in results for end in result["ends"]])
    plain, middle = ([r[key]["accuracy"] for r in results] for key in ("half way, plain", "at 0.5"))
    barriers = []
    for result in results:
        first, last = (end["loss"] for end in result["ends"])
        excess = [result[f"at {w}"]["loss"] - ((1 - w) * first + w * last) for w in (0.25, 0.5, 0.75)]
        barriers.append(max(0.0, *excess))
    each = ", ".join(f"{100 * value:.1f}" for value in middle)
    others = []
    for form in OTHER_FORMS:
        found = [r[f"half way, {form}"]["accuracy"] for r in results if f"half way, {form}" in r]
        others.append(f"{100 * mean(found):.2f}" if found else "")
    seconds = mean([result["seconds"] for result in results])
    cells = [recipe, PUBLISHED[recipe], label, f"{100 * ends:.2f}", f"{100 * mean(plain):.2f}", f"{100 * mean(middle):.2f}"]
    return "| " + " | ".join([*cells, each, *others, f"{mean(barriers):.3f}", f"{seconds:.0f}", str(len(results))]) + " |"
