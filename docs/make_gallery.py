"""Draw the pictures of the pages from real runs on the embedded digits, and write the numbers down.

python -m docs.make_gallery [NAME ...]

All of them take about a minute on one core. Numbers, seeds, commit and versions go to docs/pictures/record.json.
"""

import argparse
import copy
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import onebasin as ob
from benchmarks.digits import VisionTransformer
from docs import draw_symmetries
from onebasin.cli.digits_demo import make_mlp, train
from onebasin.datasets import digits
from onebasin.plots import plot_history, plot_paths, plot_permutation
from onebasin.reporting.report import Report
from onebasin.symmetries.layout import Factor, Product

FOLDER = Path(__file__).parent / "pictures"
CRITERION = nn.functional.cross_entropy
IMAGES, LABELS = digits("train")
TEST_IMAGES, TEST_LABELS = digits("test")
BATCHES = list(zip(IMAGES.split(200), LABELS.split(200), strict=True))
Numbers = dict[str, Any]


def evaluate(model: nn.Module) -> dict[str, float]:
    """Loss and accuracy on the test images."""
    with torch.no_grad():
        output = model(TEST_IMAGES)
    accuracy = float((output.argmax(1) == TEST_LABELS).float().mean())
    return {"loss": float(CRITERION(output, TEST_LABELS)), "accuracy": accuracy}


def train_networks(make: Callable[[], nn.Module], seeds: range, **schedule: Any) -> list[nn.Module]:
    """One network per seed, which sets its weights and the order of the images."""
    networks = []
    for seed in seeds:
        torch.manual_seed(seed)
        networks.append(train(make(), IMAGES, LABELS, seed, **schedule))
    return networks


def save(figure: Figure, name: str) -> None:
    """Write an SVG file that is the same each time."""
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})


def describe(paths: dict[str, ob.LinearPath]) -> Numbers:
    """Barrier and midpoint accuracy."""
    middle = len(next(iter(paths.values())).weights) // 2
    return {
        name: {"barrier": round(path.barrier, 4), "midpoint accuracy": round(path.metrics["accuracy"][middle], 4)}
        for name, path in paths.items()
    }


def draw_lines() -> Numbers:
    """The loss and the accuracy between two networks: as they are, aligned without data, and aligned on the loss."""
    a, b = train_networks(make_mlp, range(2))
    symmetry = ob.symmetry(a, IMAGES[:2])
    runs: dict[str, dict[str, Any]] = {
        "aligned by their weights": {},
        "aligned on the loss": {"objective": ob.Midpoint(CRITERION), "data": BATCHES},
    }
    models = {name: ob.align(b, to=a, symmetry=symmetry, **arguments).model for name, arguments in runs.items()}
    paths = {name: ob.linear_path(a, model, evaluate) for name, model in {"as they are": b, **models}.items()}
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, metric in zip(panels, ("loss", "accuracy"), strict=True):
        plot_paths(paths, axes, metric=metric).get_legend().remove()  # type: ignore[union-attr]
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, handlelength=2.6, loc="outside upper center", ncols=3
    )
    save(figure, "lines")
    return describe(paths)


def draw_plans() -> Numbers:
    """A descent on the distance of the weights: plans of the first hidden layer, and the line to B as they harden.

    The last step that is drawn is the one whose hard permutation a search keeps: that with the least distance.
    """
    a, b = train_networks(make_mlp, range(2))
    net = ob.RebasinNet(b, ob.symmetry(a, IMAGES[:2]))
    group = next(iter(net.symmetry.groups))
    plans, models, costs = descend(net, a, b, group, num_steps=100)
    kept = costs.index(min(costs))
    shown = (*(step for step in (0, 3, 5, 10) if step < kept), kept)
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    above, below = figure.subplots(2, len(shown), sharey="row")
    masses, paths = {}, {}
    for step, top, bottom in zip(shown, above, below, strict=True):
        name = f"step {step}, kept" if step == kept else f"step {step}"
        masses[name] = round(float(plans[step].amax(1).mean()), 3)
        plot_permutation(plans[step], top).set(title=name, xlabel="", ylabel="", xticks=[], yticks=[])
        paths[name] = ob.linear_path(a, models[step], evaluate)
        plot_paths({name: paths[name]}, bottom).set(xlabel="", ylabel="")
        bottom.get_legend().remove()
        bottom.set_xticks([0, 1], ["A", "B"])
        bottom.set_title(f"barrier {paths[name].barrier:.2f}", fontsize=10)
    above[0].set_ylabel("plan of a layer", labelpad=6)
    below[0].set_ylabel("loss, hardened")
    save(figure, "plans")
    distances = {f"step {step}": round(costs[step], 1) for step in shown}
    return {"mean of the largest entry in a row": masses, "squared distance, hardened": distances, **describe(paths)}


def descend(
    net: ob.RebasinNet, a: nn.Module, b: nn.Module, group: str, num_steps: int
) -> tuple[list[Tensor], list[nn.Module], list[float]]:
    """At each step of a descent: the plan of a group, B permuted by what the plans harden to, and its distance from A."""
    objective, target = ob.WeightDistance().bind(a), dict(a.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.3)  # that of `align` for 32 units
    plans, models, costs = [], [], []
    for _ in range(num_steps):
        plans.append(net.plans()[group].detach())
        models.append(harden(net, b))
        costs.append(float(objective(dict(models[-1].state_dict()), target)))
        optimizer.zero_grad()
        objective(net(), target).backward()
        optimizer.step()
    return plans, models, costs


def harden(net: ob.RebasinNet, model: nn.Module) -> nn.Module:
    """The model, permuted by what the network's plans harden to."""
    permuted = copy.deepcopy(model)
    permuted.load_state_dict(net.permutation().apply(model))
    return permuted


def draw_descent() -> Numbers:
    """The cost at each step, for Sinkhorn on the weights and on the midpoint, and the sweeps of weight matching."""
    a, b = train_networks(make_mlp, range(2))
    symmetry = ob.symmetry(a, IMAGES[:2])
    runs: dict[str, dict[str, Any]] = {
        "Sinkhorn, weights": {},
        "Sinkhorn, midpoint": {"objective": ob.Midpoint(CRITERION), "data": BATCHES, "check_every": 1},
        "weight matching": {"method": "weight-matching"},
    }
    figure = Figure(figsize=(9, 3), layout="constrained")
    numbers = {}
    for axes, (name, arguments) in zip(figure.subplots(1, 3), runs.items(), strict=True):
        result = ob.align(b, to=a, symmetry=symmetry, **arguments)
        plot_history(result.history, axes).set_title(name, fontsize=10)
        numbers[name] = {"cost before": round(result.start_cost, 3), "cost after": round(result.cost, 3)}
        hard = [entry["best"] for entry in result.history if "hard" in entry]
        if hard:
            numbers[name]["before the polish"] = round(hard[-1], 3)
    save(figure, "descent")
    return numbers


def draw_heads() -> Numbers:
    """The permutation of a vision transformer's attention: heads, and the units inside each."""
    a, b = train_networks(VisionTransformer, range(2), epochs=15, lr=2e-3)
    symmetry = ob.symmetry(a, IMAGES[:2])
    result = ob.align(b, to=a, symmetry=symmetry)
    families = [group for group in symmetry.groups.values() if group.parents]
    chosen = [symmetry.groups[families[0].parents[0]], *families]
    figure = Figure(figsize=(8.4, 3), layout="constrained")
    titles = ("heads", "units of queries and keys", "units of values")
    for axes, group, title in zip(figure.subplots(1, 3), chosen, titles, strict=True):
        plot_permutation(flat_sources(result.permutation, group), axes).set_title(title, fontsize=10)
        for line in range(1, symmetry.sizes[group.parents[0]] if group.parents else 0):
            axes.axhline(line * group.size - 0.5, color="#bbbbbb", linewidth=0.6)
            axes.axvline(line * group.size - 0.5, color="#bbbbbb", linewidth=0.6)
    save(figure, "heads")
    paths = {"as they are": ob.linear_path(a, b, evaluate), "aligned": ob.linear_path(a, result.model, evaluate)}
    return describe(paths)


def draw_report() -> Numbers:
    """The HTML report of an alignment.

    Its picture, report.png, is two screenshots of a headless browser side by side: a window of 1064 x 1420 pixels in light,
    and a frame of 390 x 1420 in dark, as on a phone.
    """
    a, b = train_networks(make_mlp, range(2))
    symmetry = ob.symmetry(a, IMAGES[:2])
    results = {
        "aligned by their weights": ob.align(b, to=a, symmetry=symmetry),
        "aligned on the loss": ob.align(b, to=a, symmetry=symmetry, objective=ob.Midpoint(CRITERION), data=BATCHES),
    }
    models = {"as they are": b, **{name: result.model for name, result in results.items()}}
    paths = {name: ob.linear_path(a, model, evaluate) for name, model in models.items()}
    accuracies = [(f"test accuracy, {name}", f"{evaluate(model)['accuracy']:.1%}") for name, model in (("A", a), ("B", b))]
    command = "python -m docs.make_gallery report"
    shown = results["aligned by their weights"]
    report = Report("Two networks on the digits", command, symmetry, None, shown, paths, accuracies)
    report.save(FOLDER / "report.html")
    return describe(paths)


def flat_sources(permutation: ob.Permutation, group: ob.Group) -> Tensor:
    """Where each unit comes from, the units of a family in the order of their parents."""
    sizes = permutation.symmetry.sizes
    whole = Product(tuple(Factor(sizes[name], name) for name in (*group.parents, group.name)))
    return permutation.move(torch.arange(whole.size), (whole,))


def draw_symmetry(name: str) -> Numbers:
    """What an element of a symmetry does to two matrices."""
    figure, numbers = draw_symmetries.DRAWINGS[name]()
    save(figure, name)
    return numbers


PICTURES: dict[str, Callable[[], Numbers]] = {
    **{name: functools.partial(draw_symmetry, name) for name in draw_symmetries.DRAWINGS},
    "lines": draw_lines,
    "plans": draw_plans,
    "descent": draw_descent,
    "heads": draw_heads,
    "report": draw_report,
}


def main() -> None:
    """Draw those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    chosen = parser.parse_args().names or list(PICTURES)
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    torch.set_num_threads(1)  # networks this small gain nothing from threads
    matplotlib.rcParams["svg.hashsalt"] = "onebasin"
    file = FOLDER / "record.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for name in chosen:
        begin = time.perf_counter()
        numbers = PICTURES[name]()
        record[name] = {"commit": commit, "torch": torch.__version__, "numbers": numbers}
        print(f"{name}: {time.perf_counter() - begin:.0f} s, {json.dumps(numbers)}", flush=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
