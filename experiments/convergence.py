"""How the cost falls while a planted permutation is found: networks of 2-16 hidden layers and VGG11-19, trained on MNIST."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onebasin as ob
from experiments.networks import trained_network
from experiments.summaries import mark_long_solves, write_markdown
from experiments.tasks import TASKS, trained_networks

DEPTHS, VGGS = (2, 4, 8, 16), ("vgg11", "vgg13", "vgg16", "vgg19")


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is one network and one random permutation of it."""
    networks = [f"{depth} hidden" for depth in (DEPTHS[:2] if quick else DEPTHS)] + ([] if quick else list(VGGS))
    epochs = {"epochs": 1} if quick else {"epochs": 5}
    return [{"network": n, "seed": 0, **epochs} for n in networks]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Train, permute, and follow the descent, without copy detection and the final polish."""
    model, example = _make(config, device)
    symmetry = ob.symmetry(model, example)
    planted = symmetry.random(torch.Generator().manual_seed(config["seed"] + 1))
    copy = planted.apply(model)
    found = ob.align(copy, to=model.state_dict(), symmetry=symmetry, detect_copy=False, polish=False, check_every=1)
    return {
        "exact": found.permutation == planted.inverse(),
        "seconds": found.seconds,
        "start": found.start_cost,
        "soft": [entry["soft"] for entry in found.history],
        "hard": [entry["hard"] for entry in found.history],
    }


def _make(config: dict[str, Any], device: str) -> tuple[nn.Module, torch.Tensor]:
    name = config["network"]
    if name in VGGS:
        return trained_network(name, "MNIST", config["seed"], config["epochs"], device), torch.zeros(
            2, 1, 32, 32, device=device
        )
    task = replace(TASKS["MNIST"], widths=(784, *[64] * int(name.split()[0]), 10), epochs=config["epochs"])
    stack = trained_networks(task, [config["seed"]], device)
    model = task.make_model().to(device)
    model.load_state_dict({key: value[0] for key, value in stack.items()})
    return model, torch.zeros(2, 784, device=device)


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """The cost of the hardened model by step, relative to that at the start."""
    from experiments.figures import new_figure, save_figure

    figure, axes = new_figure(1, 2, width=9, height=3.4)
    groups = (
        [r for r in records if "hidden" in r["config"]["network"]],
        [r for r in records if "vgg" in r["config"]["network"]],
    )
    for ax, title, chosen in zip(axes, ("Fully connected, 64 units a layer", "VGG"), groups, strict=True):
        for record in chosen:
            result = record["result"]
            (line,) = ax.plot(
                [c / result["start"] for c in [result["start"], *result["hard"]]], label=record["config"]["network"]
            )
            soft = [result["start"], *result["soft"]]
            ax.plot([c / result["start"] for c in soft], color=line.get_color(), linestyle=":", linewidth=1)
        ax.set(title=title, xlabel="step", ylabel="L2 cost / L2 cost at the start", ylim=(0, None))
        if chosen:
            ax.legend(title="hard (soft: dotted)", frameon=False)
    save_figure(figure, folder / "convergence")
    rows = []
    for record in records:
        result = record["result"]
        steps = next((i + 1 for i, cost in enumerate(result["hard"]) if cost == 0), None)
        exact = "exact" if result["exact"] else "not found"
        label = mark_long_solves(record["config"]["network"], [record])
        rows.append([label, exact, "" if steps is None else str(steps), f"{result['seconds']:.2f}"])
    write_markdown(
        folder / "convergence.md", "Convergence on planted copies", [(["network", "", "steps", "seconds"], rows)], records
    )
