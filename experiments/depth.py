"""Depth, and what the paper could not do: VGG11-19, ResNet-20 and a small vision transformer, trained on CIFAR-10."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from experiments.deep import with_scales
from experiments.networks import load_images, trained_network
from experiments.tasks import Data

NETWORKS = ("vgg11", "vgg13", "vgg16", "vgg19", "resnet20", "resnet20x4", "vit")
METHODS = {
    "naive": "naive",
    "wm": "weight matching",
    "l2": "Sinkhorn L2",
    "mid": "Sinkhorn Mid",
    "wm+mid": "WM, then Sinkhorn Mid",
    "am": "activation matching",
    "auto": "the default on Mid",
    "am+scales": "activation matching, then scales",
    "l2+scales": "Sinkhorn L2, then scales",
}
NUM_POINTS = 11
PAIRS = ((0, 1), (1, 2), (2, 0))
"""Seeds of the networks."""
CRITERION = nn.functional.cross_entropy


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one pair of one network by one method."""
    networks = ("resnet20",) if quick else NETWORKS
    scale = {"epochs": 1, "num_train": 500, "steps": 5} if quick else {"epochs": 20, "num_train": None, "steps": 200}
    methods = ("naive", "wm", "am+scales") if quick else METHODS
    return [
        {"network": n, "seeds": list(pair), "method": m, **scale}
        for n in networks
        for pair in PAIRS[: 1 if quick else 3]
        for m in methods
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Align the second network to the first; the line between them on training and test data, plain and repaired."""
    training = (config["epochs"], device, config["num_train"])
    target, source = (trained_network(config["network"], "CIFAR-10", seed, *training) for seed in config["seeds"])
    train, test = (load_images("CIFAR-10", split).to(device) for split in ("train", "test"))
    limit = config["num_train"] or 5000
    train, test = Data(train.x[:limit], train.y[:limit]), Data(test.x[: 2 * limit], test.y[: 2 * limit])
    batches = train.batches(250)
    symmetry = ob.symmetry(target, train.x[:2])
    middle = {"objective": ob.Midpoint(CRITERION), "data": batches}
    options: dict[str, Any] = {
        "wm": {"method": "weight-matching"},
        "l2": {"method": "sinkhorn"},
        "mid": {"method": "sinkhorn", "steps": config["steps"], **middle},
        "wm+mid": {"method": "sinkhorn", "steps": config["steps"], "init": "weight-matching", **middle},
        "am": {"method": "activation-matching", "data": batches},
        "auto": {"objective": ob.Midpoint(CRITERION, repaired=True), "data": batches},
    }
    first, _, then = config["method"].partition("+")
    found = None
    if then == "scales":
        target, source, symmetry = with_scales(target, source, train.x[:2], [x for x, _ in batches])
        start = ob.align(source, to=target, symmetry=replace(symmetry, scales={}), **options[first])
        line = {"objective": ob.RandomPoint(CRITERION, low=0.3, high=0.7), "data": batches, "init": start.permutation}
        scaling = ob.Scaling(steps=config["steps"])
        found = ob.align(source, to=target, symmetry=symmetry, method=ob.Sinkhorn(steps=0), scaling=scaling, **line)
    elif first != "naive":
        found = ob.align(source, to=target, symmetry=symmetry, **options[config["method"]])
    moved = source if found is None else found.model
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # from here on it is only measured
    result = {
        "seconds": 0.0 if found is None else found.seconds,
        "moved": 0.0 if found is None else _share_moved(found.permutation),
        "distance": float(ob.WeightDistance().bind(target)(moved.state_dict(), target.state_dict())),
    }
    splits = {"train": train, "test": test}
    for repaired in (False, True):
        evaluate = _Evaluation(splits, [target, moved], batches[:4], symmetry if repaired else None)
        path = ob.linear_path(target, moved, evaluate, NUM_POINTS, data=None if repaired else batches[:4])
        result["repaired" if repaired else "plain"] = {"weights": path.weights, **path.metrics}
    return result


def _share_moved(permutation: ob.Permutation) -> float:
    """The share of units that do not stay in place."""
    moved = [
        (permutation[name] != torch.arange(permutation[name].shape[-1])).flatten() for name in permutation.symmetry.groups
    ]
    return float(torch.cat(moved).float().mean()) if moved else 0.0


class _Evaluation:
    """Loss and accuracy of a point of the line, its units' statistics corrected first if a symmetry is given."""

    def __init__(self, splits: dict[str, Data], ends: list[nn.Module], batches: list[Any], symmetry: ob.Symmetry | None):
        self.splits, self.ends, self.batches, self.symmetry = splits, ends, batches, symmetry
        self.count = 0

    def __call__(self, model: nn.Module) -> dict[str, float]:
        weight = self.count / (NUM_POINTS - 1)
        self.count += 1
        if self.symmetry is not None:
            fixed = ob.repair(model, self.ends, self.batches, self.symmetry, [1 - weight, weight], tolerance=float("inf"))
            model = copy.deepcopy(model)
            model.load_state_dict(fixed.state)
        metrics: dict[str, float] = {}
        with torch.no_grad():
            for split, data in self.splits.items():
                outputs = [(model(x), y) for x, y in data.batches(1000)]
                loss = sum(float(CRITERION(o, y)) * len(y) for o, y in outputs) / len(data.y)
                right = sum(int((o.argmax(1) == y).sum()) for o, y in outputs)
                metrics |= {f"{split} loss": loss, f"{split} accuracy": right / len(data.y)}
        return {"loss": metrics["train loss"], **metrics}


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """A table, the curves of VGG11 and VGG19, barrier and AUC by depth."""
    from experiments.depth_drawing import draw_all

    draw_all(records, folder)
