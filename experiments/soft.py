"""Is the soft midpoint a good merge? Against the repaired hard midpoint fine-tuned for as many steps on the same images.

A soft permutation mixes the units of a network, and a descent on the loss at the midpoint trains that mixture. The result is
no midpoint of the two networks any more: it is close to the first one, and behind it. Both candidates start from activation
matching, take the same number of steps on the same augmented images, and have their statistics estimated on the same ones.
The networks are those of the second run of the experiment "deep", which are stored. The cosines between the weights of the
result and those of its parents say how much it has of each.
"""

from __future__ import annotations

import copy
import time
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from experiments.anchor_networks import BATCH, RECIPES, augment, load_images, trained_networks
from experiments.deep import CRITERION, Augmented, measure

METHODS = {
    "hard": "activation matching, midpoint",
    "blurred": "soft midpoint of blurred plans (mass 0.1), not trained",
    "soft": "soft midpoint",
    "fine-tuned 0.0001": "midpoint, fine-tuned, Adam 1e-4",
    "fine-tuned 0.001": "midpoint, fine-tuned, Adam 1e-3",
    "fine-tuned 0.003": "midpoint, fine-tuned, Adam 3e-3",
    "fine-tuned 0.01": "midpoint, fine-tuned, Adam 1e-2",
}


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one pair merged in one way."""
    return [
        {"recipe": "resnet20-long", "seeds": seeds, "method": method, "steps": 2 if quick else 200}
        for seeds in ([0, 1], [1, 2], [2, 0])[: 1 if quick else 3]
        for method in METHODS
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Merge the pair and measure the result, with statistics estimated on training images."""
    target, source = trained_networks(RECIPES[config["recipe"]], config["seeds"], device, run=2)
    images, labels = load_images("train", device)
    torch.manual_seed(0)
    data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    found = ob.align(source, to=target, example_inputs=images[:2], method=ob.ActivationMatching(num_batches=10), data=data)
    batches = islice(chain.from_iterable(repeat(Augmented(data))), config["steps"])
    begin = time.perf_counter()
    name, _, rate = config["method"].partition(" ")
    if name == "soft":
        state = _make_soft_midpoint(target, found, batches, mass=0.99)
    elif name == "blurred":
        state = _make_soft_midpoint(target, found, (), mass=0.1)
    else:
        state = ob.interpolate([target, found.model], [0.5, 0.5])
    merged = copy.deepcopy(target)
    merged.load_state_dict(state)
    if name == "fine-tuned":
        _fine_tune(merged, batches, float(rate))
    seconds = time.perf_counter() - begin
    merged.load_state_dict(ob.reset_batch_norm(merged, [augment(x) for x, _ in data[:20]]))
    test = load_images("test", device)
    return {
        "seconds": seconds,
        "merged": measure(merged.eval(), *test),
        "ends": [measure(parent, *test) for parent in (target, source)],
        "cosines": [_cosine(merged, parent) for parent in (target, found.model)],
    }


@torch.no_grad()
def _cosine(first: nn.Module, second: nn.Module) -> float:
    """Of the angle between the weights of two networks, the mean over their convolutions."""
    pairs = zip(first.modules(), second.modules(), strict=True)
    weights = [(a.weight.flatten(), b.weight.flatten()) for a, b in pairs if isinstance(a, nn.Conv2d)]
    return float(torch.stack([torch.cosine_similarity(a, b, 0) for a, b in weights]).mean())


def _make_soft_midpoint(target: nn.Module, found: ob.Alignment, batches: Any, mass: float) -> Any:
    """The midpoint of the target and the softly permuted source, its plans trained on the loss, if there are batches."""
    symmetry = found.permutation.symmetry
    net = ob.RebasinNet(found.model, symmetry, init=symmetry.identity(), mass=mass)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.2)
    objective = ob.Midpoint(CRITERION).bind(target)
    for batch in batches:
        optimizer.zero_grad()
        objective(net(), target.state_dict(), batch).backward()
        optimizer.step()
    with torch.no_grad():
        return ob.interpolate([target.state_dict(), net()], [0.5, 0.5])


def _fine_tune(model: nn.Module, batches: Any, rate: float) -> None:
    optimizer = torch.optim.Adam(model.train().parameters(), lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()


def _verdict(records: list[dict[str, Any]]) -> list[str]:
    """What the soft midpoint has of each network."""
    found = [r["result"] for r in records if r["config"]["method"] == "soft" and "cosines" in r["result"]]
    if not found:
        return []
    accuracy = 100 * sum(result["merged"]["accuracy"] for result in found) / len(found)
    near, far = (sum(side) / len(found) for side in zip(*(result["cosines"] for result in found), strict=True))
    return [f"- The soft midpoint has {accuracy:.2f} %, with cosines of {near:.2f} and {far:.2f} to the two networks.", ""]


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """One table, a row per method."""
    lines = [
        "# The soft midpoint as a merge",
        "",
        *_verdict(records),
        "| network | method | steps | test accuracy | each pair | cosine to the target, to the aligned source | seconds |",
        "|---" * 7 + "|",
    ]
    for method, label in METHODS.items():
        found = [r for r in records if r["config"]["method"] == method]
        if found:
            values = [100 * r["result"]["merged"]["accuracy"] for r in found]
            seconds = sum(r["result"]["seconds"] for r in found) / len(found)
            config = found[0]["config"]
            each = ", ".join(f"{value:.2f}" for value in values)
            mean = sum(values) / len(values)
            near = [r["result"]["cosines"] for r in found if "cosines" in r["result"]]
            cosines = ", ".join(f"{sum(side) / len(side):.2f}" for side in zip(*near, strict=True))
            cells = [config["recipe"], label, str(config["steps"]), f"{mean:.2f}", each, cosines, f"{seconds:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    ends = [100 * end["accuracy"] for r in records if "ends" in r["result"] for end in r["result"]["ends"]]
    if ends:
        lines += ["", f"The networks themselves: {sum(ends) / len(ends):.2f}."]
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soft.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
