"""Three and five deep networks merged at once: aligned to the first, to the mean of the others, or to a common frame.

The networks have the recipes of the experiment "deep"; and ResNet-20 4x of 20 epochs, of which five are cheap. Three of
ResNet-20 with 250 epochs are stored with the experiments, so that they need no training. Statistics are
put right on 50,000 augmented training images with those of the aligned parents, whatever the reference.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import onebasin as ob
from experiments.anchor_networks import BATCH, RECIPES, Recipe, augment, load_images, trained_networks
from experiments.deep import CRITERION, Augmented, measure

NETWORKS = {
    "vgg11": RECIPES["vgg11"],
    "resnet20-short": RECIPES["resnet20-short"],
    "resnet20-long": RECIPES["resnet20-long"],
    "resnet20-4x-short": RECIPES["resnet20-4x-short"],
    "resnet20-4x-20": Recipe("resnet20", 4, 20, 0.4),
}
STORED = {"resnet20-long": 2}
"""The run whose three networks are stored."""
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1)), ((0, 1, 2, 3, 4), (1, 2, 3, 4, 0), (2, 3, 4, 0, 1))
"""Seeds of the networks, in other orders, since the first one is a reference."""
MATCHINGS = {
    "wm": "weight matching",
    "l2": "Sinkhorn L2",
    "am": "activation matching",
    "am+scales": "activation matching, scales",
}
REFERENCES = {"first": "the first", "mean": "the mean of the others", "common": "a common frame"}
_TOGETHER = "the first, scales learned for all at once"
"""What ``reference="common"`` is if there are scales: no frame is looked for."""


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one set of networks, in one order, merged in one way."""
    return [
        {"recipe": recipe, "seeds": list(order), "matching": matching, "reference": reference}
        for recipe in (("resnet20-short",) if quick else NETWORKS)
        for orders in ORDERS[: 1 if quick or recipe in STORED else 2]
        for order in orders[: 1 if quick else 3]
        for matching in (("wm",) if quick else MATCHINGS)
        for reference in REFERENCES
        if reference != "mean" or matching != "am+scales"
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Merge the networks and measure the result, with statistics corrected."""
    models = trained_networks(NETWORKS[config["recipe"]], config["seeds"], device, STORED.get(config["recipe"], 1))
    images, labels = load_images("train", device)
    torch.manual_seed(0)
    data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    shuffled = [data[i] for i in torch.randperm(len(data)).tolist()]
    options: dict[str, Any] = {
        "wm": {"method": "weight-matching"},
        "l2": {"method": "sinkhorn"},
        "am": {"method": ob.ActivationMatching(num_batches=20), "data": shuffled},
        "am+scales": {
            "objective": ob.RandomPoint(CRITERION, low=0.3, high=0.7), "data": Augmented(shuffled), "kinds": "positive",
        },
    }[config["matching"]]  # fmt: skip
    batches = [augment(batch) for batch in images.split(BATCH)]
    begin = time.perf_counter()
    merged = ob.merge(models, images[:2], repair=batches, reference=config["reference"], **options)
    seconds = time.perf_counter() - begin
    test = load_images("test", device)
    return {"seconds": seconds, "ends": [measure(m, *test) for m in models], "merged": measure(merged, *test)}


def _place(record: dict[str, Any]) -> tuple[Any, ...]:
    """Where a record belongs in the table."""
    config = record["config"]
    matching = list(MATCHINGS).index(config["matching"])
    return list(NETWORKS).index(config["recipe"]), len(config["seeds"]), matching, config["seeds"]


def _verdicts(records: list[dict[str, Any]]) -> list[str]:
    """The best reference for each network, number of networks and matching, by the mean over the orders."""
    found: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for record in records:
        config = record["config"]
        row = found.setdefault((config["recipe"], len(config["seeds"]), config["matching"]), {})
        row.setdefault(config["reference"], []).append(100 * record["result"]["merged"]["accuracy"])
    lines = []
    for (recipe, count, matching), row in found.items():
        means = {reference: sum(values) / len(values) for reference, values in row.items()}
        best = max(means, key=lambda reference: means[reference])
        label = f"{count} of {recipe}, {MATCHINGS[matching]}"
        reference = _TOGETHER if best == "common" and matching.endswith("scales") else REFERENCES[best]
        lines.append(f"- {label}: best aligned to {reference}, {means[best]:.2f} %.")
    return lines


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """One table: a row per network, number of networks and matching; a column per reference, means over the orders."""
    lines = [
        "# Several deep networks merged at once, CIFAR-10",
        "",
        "Test accuracy of the merged network, statistics corrected on 50,000 augmented training images.",
        "In brackets each order of the networks. In rows with scales the last column is",
        f"another method: aligned to {_TOGETHER}.",
        "",
        "| network | merged | ends | matching | " + " | ".join(REFERENCES.values()) + " |",
        "|---" * (4 + len(REFERENCES)) + "|",
    ]
    records = sorted(records, key=_place)
    rows = dict.fromkeys((r["config"]["recipe"], len(r["config"]["seeds"]), r["config"]["matching"]) for r in records)
    for recipe, count, matching in rows:
        same = [
            r
            for r in records
            if (r["config"]["recipe"], len(r["config"]["seeds"]), r["config"]["matching"]) == (recipe, count, matching)
        ]
        ends = [100 * end["accuracy"] for r in same for end in r["result"]["ends"]]
        cells = []
        for reference in REFERENCES:
            found = [100 * r["result"]["merged"]["accuracy"] for r in same if r["config"]["reference"] == reference]
            each = ", ".join(f"{value:.1f}" for value in found)
            cells.append(f"{sum(found) / len(found):.2f} ({each})" if found else "")
        lines.append(
            f"| {recipe} | {count} | {sum(ends) / len(ends):.2f} | {MATCHINGS[matching]} | " + " | ".join(cells) + " |"
        )
    lines[2:2] = [*_verdicts(records), ""]
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "many.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
