"""Transformers that were trained apart, aligned by every kind of symmetry: the barrier on the line between them.

GLMC (NeurIPS 2025) reaches a barrier of zero with a merged network that is larger than its parents; here the architecture
and the number of parameters stay, and the function of the end is unchanged.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from experiments.anchor_networks import augment
from experiments.kept_functions import measure_end
from experiments.midpoint_drawing import draw_lines
from experiments.transformer_networks import RECIPES, load_data, loss, trained_networks

METHODS = {
    "naive": "as they are",
    "wm": "weight matching, permutations",
    "am": "activation matching, permutations",
    "am+learned": "permutations learned, from activation matching",
    "auto": "the default, permutations learned and exchanged",
    "stream": "weight matching, permutations and rotations of the stream (no data)",
    "heads": "weight matching, those and maps inside heads (no data)",
    "wm-all": "weight matching, all kinds (no data)",
    "text-all": "activation matching on text that the networks write, all kinds (no data)",
    "drawn-all": "activation matching on drawn images, all kinds (no data)",
    "am-all": "activation matching, all kinds",
    "stream+learned": "weight matching, rotations of the stream learned",
    "heads+learned": "weight matching, those and maps inside heads learned",
    "wm-all+learned": "weight matching, all kinds learned",
    "am-all+learned": "activation matching, all kinds learned",
    "text-all+learned": "the same on text that the networks write (no data)",
    "drawn-all+learned": "the same on drawn images that the networks label (no data)",
}
_STREAM = {"orthogonal", "centred"}
_PARTS = {"stream": _STREAM, "heads": _STREAM | {"linear", "rotary"}}
"""The kinds of bases of some methods; these have no scales and no signs."""
THREE = "three"
"""Three networks aligned at once, and measured on a grid of the simplex between them."""
PUBLISHED = {"vit": "0.36 / 0.45 / 0.00", "gpt": "0.34 / 0.63 / 0.02", "llama": ""}
"""GLMC: by weights / permutations learned / all learned, in a larger network."""
NUM_POINTS = 11
STEPS = 1500
FEWER_STEPS = {"vit": (100, 200, 500), "gpt": (25, 50, 200), "llama": (25, 50, 200)}
"""How soon all kinds are learned: one and two epochs of the data, and some more."""


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one pair of one network by one method."""
    networks = ("gpt",) if quick else tuple(RECIPES)
    trials = [
        (network, pair, method, STEPS)
        for network in networks
        for pair in ([0, 1], [0, 2], [1, 2])[: 1 if quick else 3]
        for method in METHODS
        if not method.startswith("text" if network == "vit" else "drawn")
    ]
    if not quick:
        trials += [(n, [0, 1], "wm-all+learned", steps) for n in networks for steps in FEWER_STEPS[n]]
    trials += [(network, [0, 1, 2], THREE, 2 * STEPS) for network in networks]
    return [
        {"network": network, "seeds": seeds, "method": method, "steps": 5 if quick else steps, "quick": quick}
        for network, seeds, method, steps in trials
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Align the second network to the first; the loss on the line on training and test data."""
    recipe = RECIPES[config["network"]]
    if config["quick"]:
        recipe = replace(recipe, width=32, num_blocks=2, num_heads=4, hidden=32, steps=20, batch=8, context=16)
    target, *sources = trained_networks(recipe, config["seeds"], device)
    train, test = (load_data(recipe.network, split, device, recipe.context) for split in ("train", "test"))
    size = 500 if recipe.network == "vit" else 64
    batches = list(zip(*(part[: 100 * size].split(size) for part in train), strict=True))
    begin = time.perf_counter()
    if config["method"] == THREE:
        return _measure_simplex(config, target, sources, batches, test) | {"seconds": time.perf_counter() - begin}
    (source,) = sources
    found = _align(config, source, target, batches)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    first, second = (target, source) if found is None else (found.target, found.model)
    result: dict[str, Any] = {"seconds": seconds, **measure_end(source, found, test[0][:64])}
    for name, (inputs, targets) in {"train": batches[0], "test": test}.items():
        path = ob.linear_path(first, second, lambda m, x=inputs, y=targets: evaluate(m, x, y), NUM_POINTS)
        result[name] = {"weights": path.weights, "barrier": path.barrier, **path.metrics}
    return result


def _align(
    config: dict[str, Any], source: nn.Module, target: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> ob.Alignment | None:
    method, _, then = config["method"].partition("+")
    if method == "naive":
        return None
    if method.startswith("text"):
        size, length = batches[0][0].shape
        num_texts = size * (2 if config["quick"] else 25)
        (written,) = ob.synthetic_text([target, source], length, num_batches=1, batch_size=num_texts)
        batches = list(zip(*(part.split(size) for part in written), strict=True))
    if method.startswith("drawn"):
        images = batches[0][0]
        batches = ob.synthetic_images([target, source], images.shape[1:], num_batches=100, batch_size=len(images))
    line = Line(nn.functional.cross_entropy if method.startswith("drawn") else loss, low=0.4, high=0.6)
    options: dict[str, Any] = {"example_inputs": batches[0][0][:2], "seed": 0}
    if method == "auto":
        return ob.align(source, to=target, objective=line, data=batches, **options)
    if method.startswith(("am", "text", "drawn")):
        options |= {"method": ob.ActivationMatching(num_batches=20), "data": batches}
    else:
        options["method"] = "weight-matching"
    if method.endswith("-all"):
        options |= {"kinds": "all", "scaling": ob.Scaling(steps=config["steps"] if then else 0)}
    if method in _PARTS:
        source, target, symmetry = _restrict(source, target, options.pop("example_inputs"), _PARTS[method])
        options |= {"kinds": "all", "symmetry": symmetry, "scaling": ob.Scaling(steps=config["steps"] if then else 0)}
    if then:
        options |= {"objective": line, "data": Shuffled(batches)}
    if method == "am" and then:
        steps = config["steps"]
        learned = ob.Sinkhorn(steps=steps, start="scaled", mass=0.99, patience=steps, check_every=50)
        options |= {"method": learned, "init": options["method"]}
    return ob.align(source, to=target, **options)


def _restrict(
    source: nn.Module, target: nn.Module, inputs: Tensor, kinds: set[str]
) -> tuple[nn.Module, nn.Module, ob.Symmetry]:
    """Both networks in canonical form, and their symmetry with bases of some kinds alone."""
    forms = [ob.canonical(model, inputs).model for model in (source, target)]
    symmetry = ob.symmetry(forms[1], inputs, kinds="all")
    bases = {name: basis for name, basis in symmetry.bases.items() if basis.kind in kinds}
    return forms[0], forms[1], replace(symmetry, bases=bases, scales={})


def _measure_simplex(
    config: dict[str, Any],
    target: nn.Module,
    sources: list[nn.Module],
    batches: list[tuple[Tensor, Tensor]],
    test: tuple[Tensor, Tensor],
) -> dict[str, Any]:
    """The loss at the points of a grid between three networks, and how far it is above that of the ends."""
    networks, inputs, found = [target, *sources], batches[0][0][:2], []
    options: dict[str, Any] = {"objective": Line(loss, low=0.4, high=0.6), "data": Shuffled(batches)}
    options |= {"kinds": "all", "method": "weight-matching", "scaling": ob.Scaling(steps=config["steps"])}
    ob.merge(networks, inputs, reference="common", on_aligned=found.extend, **options)
    states = [each.apply(ob.canonical(network, inputs).state) for each, network in zip(found, networks, strict=True)]
    weights = [(4 - i - j, i, j) for i in range(5) for j in range(5 - i)]
    middle, measured = copy.deepcopy(target), []
    for shares in weights:
        mean = {key: sum(s / 4 * state[key] for s, state in zip(shares, states, strict=True)) for key in states[0]}
        middle.load_state_dict(mean)
        measured.append(evaluate(middle, *test))
    corners = [measured[weights.index(tuple(4 * (n == m) for m in range(3)))]["loss"] for n in range(3)]
    above = [
        m["loss"] - sum(s / 4 * c for s, c in zip(shares, corners, strict=True))
        for m, shares in zip(measured, weights, strict=True)
    ]
    return {"weights": weights, "test": {name: [m[name] for m in measured] for name in measured[0]}, "barrier": max(above)}


class Line(ob.RandomPoint):
    """The loss between two networks; on a GPU it is differentiated in bfloat16, as it was when they were trained."""

    def at(self, params: Any, target: Any, batch: Any, weight: float | Tensor) -> Tensor:
        """The loss at a point; where it is only compared, in the precision of the parameters."""
        device = next(v for v in params.values() if isinstance(v, Tensor)).device.type
        in_half = device == "cuda" and torch.is_grad_enabled()
        with torch.autocast(device, torch.bfloat16, enabled=in_half, cache_enabled=False):
            return super().at(params, target, batch, weight)


class Shuffled:
    """Batches in another order each time they are read, images augmented anew."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]):
        self.batches = batches

    def __iter__(self):
        for number in torch.randperm(len(self.batches)).tolist():
            inputs, targets = self.batches[number]
            yield augment(inputs) if inputs.is_floating_point() else inputs, targets


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss and accuracy."""
    total = right = 0.0
    for x, y in zip(inputs.split(500), targets.split(500), strict=True):
        output = model(x)
        total += float(loss(output, y)) * len(x)
        right += float((output.argmax(-1) == y).float().mean()) * len(x)
    return {"loss": total / len(inputs), "accuracy": right / len(inputs)}


def _verdicts(records: list[dict[str, Any]]) -> list[str]:
    """What is left between the networks if all kinds are learned."""
    lines = []
    for network in RECIPES:
        wanted = {"network": network, "method": "wm-all+learned", "steps": STEPS}
        tests = [r["result"]["test"] for r in records if wanted.items() <= r["config"].items()]
        if tests:
            ends = fmean((test["accuracy"][0] + test["accuracy"][-1]) / 2 for test in tests)
            middle = fmean(test["accuracy"][NUM_POINTS // 2] for test in tests)
            highest = max(test["barrier"] for test in tests)
            lines.append(
                f"- {network}, all kinds learned, {len(tests)} pairs: highest test barrier {highest:.3f}, "
                f"midpoint {middle:.2%}, ends {ends:.2%}."
            )
    return lines


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """One table: a row per network and method, means over pairs; then three networks at once, and fewer steps."""
    header = (
        "| network | published | method | ends | test barrier | each pair | train barrier | accuracy, ends | midpoint "
        "| seconds |"
    )
    lines = [
        "# Transformers that were trained apart",
        "",
        *_verdicts(records),
        "",
        "Test barrier (the loss on the line above the line between the losses of the ends), and midpoint accuracy.",
        "Published: GLMC by weights / permutations learned / all learned, the last in a network that grows.",
        "",
        header,
        "|---" * 10 + "|",
    ]
    fewer, three = [], []
    for network in RECIPES:
        rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for record in records:
            config = record["config"]
            if config["network"] == network:
                rows.setdefault((config["method"], config["steps"]), []).append(record["result"])
        for method, label in METHODS.items():
            if same := rows.pop((method, STEPS), None):
                lines.append(f"| {network} | {PUBLISHED[network]} | {label} | {_describe(same)} |")
        for (method, steps), same in sorted(rows.items()):
            if method != THREE:
                fewer.append(f"| {network} | {steps} | {_describe(same)} |")
                continue
            for result in same:
                accuracy = result["test"]["accuracy"]
                three.append(
                    f"Three {network}s at once, {steps} steps, {len(result['weights'])} points of the simplex: "
                    f"highest barrier {result['barrier']:.3f}, accuracy from {min(accuracy):.2%} to {max(accuracy):.2%}, "
                    f"{result['seconds']:.0f} s."
                )
    if three:
        lines += ["", *three]
    if fewer:
        lines += ["", "Weight matching, then all kinds learned in fewer steps:", ""]
        lines += ["| network | steps | " + header.split(" | ", 3)[3], "|---" * 9 + "|", *fewer]
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transformers.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    _draw_lines(records, folder / "transformers.svg")


_NAMES = {"vit": "ViT", "gpt": "GPT", "llama": "Llama-like"}
_DRAWN = {
    "naive": "as they are",
    "wm": "permutations, by weights",
    "wm-all": "all kinds, by weights",
    "wm-all+learned": "all kinds, learned",
}


def _draw_lines(records: list[dict[str, Any]], file: Path) -> None:
    """The test loss on the line, means over the pairs, for each network that has all of these methods."""
    panels = {}
    for network in RECIPES:
        curves: dict[str, list[list[float]]] = {method: [] for method in _DRAWN}
        for record in records:
            config = record["config"]
            if (config["network"], config["steps"]) == (network, STEPS) and config["method"] in _DRAWN:
                curves[config["method"]].append(record["result"]["test"]["loss"])
        if all(curves.values()):
            panels[_NAMES[network]] = {
                _DRAWN[method]: [fmean(point) for point in zip(*losses, strict=True)] for method, losses in curves.items()
            }
    if panels:
        draw_lines(panels, file)


def _describe(same: list[dict[str, Any]]) -> str:
    """Cells of a row: means over the pairs of one network by one method, and each test barrier."""
    test = [result["test"] for result in same]
    ends = [t[name][end] for name in ("loss", "accuracy") for t in test for end in (0, -1)]
    losses, accuracies = ends[: len(ends) // 2], ends[len(ends) // 2 :]
    middle = [t["accuracy"][NUM_POINTS // 2] for t in test]
    each = [t["barrier"] for t in test]
    train, seconds = [result["train"]["barrier"] for result in same], [result["seconds"] for result in same]
    cells = [f"{fmean(losses):.3f}", f"{fmean(each):.3f}", ", ".join(f"{value:.3f}" for value in each)]
    cells += [f"{fmean(train):.3f}", f"{fmean(accuracies):.2%}", f"{fmean(middle):.2%}", f"{fmean(seconds):.0f}"]
    return " | ".join(cells)
