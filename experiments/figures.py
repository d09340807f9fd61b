"""How figures look, and the two that need no trial of their own: the loss plane, and permutation matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import onebasin as ob
from onebasin.plots import plot_paths

METHOD_COLORS = {
    "naive": "0.5", "repair": "0.75", "wm": "C0", "activation": "C4", "ste": "C2", "l2": "C3", "mid": "C1", "rnd": "C5",
}  # fmt: skip


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """As PNG, for documents."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)


def save_svg(figure: Any, file: Path) -> None:
    """As an SVG file that is the same each time."""
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "onebasin"}):
        figure.savefig(file, metadata={"Date": None, "Creator": None})


def configs(quick: bool) -> list[dict[str, Any]]:
    """One pair of networks of Pol3, and one planted network, each from a seed."""
    return [{"figure": "plane", "seed": 0, "resolution": 9 if quick else 41}, {"figure": "matrices", "seed": 0}]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """The numbers behind a figure."""
    return _plane(config) if config["figure"] == "plane" else _matrices(config)


def _plane(config: dict[str, Any]) -> dict[str, Any]:
    """Loss on the plane through a network, another, and that one moved into the basin of the first; and on two lines."""
    from experiments.table2 import load_pairs
    from experiments.tasks import load

    pairs = load_pairs({"task": "Pol1", "width": 10, "num_pairs": 50, "first": config["seed"], "num": 1}, "cpu")
    source, target = pairs.modules(0)
    data = load(pairs.task, "train")
    found = ob.align(
        source, to=target, symmetry=pairs.symmetry, objective=ob.RandomPoint(pairs.task.loss), data=pairs.batches,
        steps=300, patience=200,
    )  # fmt: skip

    def evaluate(model: torch.nn.Module) -> float:
        return float(pairs.task.loss(model(data.x), data.y))

    plane = ob.loss_plane(target, source, found.model, evaluate, config["resolution"], margin=0.25)
    lines = {name: ob.linear_path(target, model, evaluate) for name, model in (("naive", source), ("rnd", found.model))}
    return {
        "plane": {"x": plane.x, "y": plane.y, "points": plane.points, "loss": plane.losses},
        "lines": {name: {"weights": line.weights, "loss": line.losses} for name, line in lines.items()},
    }


def _matrices(config: dict[str, Any]) -> dict[str, Any]:
    """The permutation that was planted, and what weight matching and Sinkhorn find, on a network where the first errs."""
    from experiments.table1 import make_networks

    for seed in range(config["seed"], config["seed"] + 50):
        model = make_networks("Rnd", 2, [seed])[0]
        symmetry = ob.symmetry(model, torch.zeros(1, 1))
        planted = symmetry.random(torch.Generator().manual_seed(seed + 1))
        copy = planted.apply(model)
        expected = planted.inverse()
        arguments: dict[str, Any] = {"to": model.state_dict(), "symmetry": symmetry}
        matched = ob.align(copy, method="weight-matching", order="random", detect_copy=False, **arguments).permutation
        if matched != expected:
            found = ob.align(copy, **arguments).permutation
            named = {"expected": expected, "weight matching": matched, "Sinkhorn L2": found}
            return {"seed": seed, **{n: {g: p[g].tolist() for g in symmetry.groups} for n, p in named.items()}}
    raise ValueError("weight matching found all fifty: there is nothing to show")


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """Draw what was computed."""
    from onebasin.landscape.paths import LinearPath, Plane

    for record in records:
        result = record["result"]
        if record["config"]["figure"] == "plane":
            stored = result["plane"]
            plane = Plane(stored["x"], stored["y"], tuple(map(tuple, stored["points"])), {"loss": stored["loss"]})
            figure, axes = new_figure(1, 2, width=9.5, height=4)
            plane.plot(axes[0])
            lines = {n: LinearPath(line["weights"], {"loss": line["loss"]}) for n, line in result["lines"].items()}
            plot_paths({"as they are": lines["naive"], "Sinkhorn Rnd": lines["rnd"]}, ax=axes[1])
            save_figure(figure, folder / "plane")
        else:
            _draw_matrices(result, folder)


def _draw_matrices(result: dict[str, Any], folder: Path) -> None:
    names = ["expected", "weight matching", "Sinkhorn L2"]
    groups = list(result["expected"])
    figure, axes = new_figure(len(groups), 3, width=7.5, height=2.6 * len(groups))
    for row, group in enumerate(groups):
        for ax, name in zip(axes[row], names, strict=True):
            index, expected = torch.tensor(result[name][group]), torch.tensor(result["expected"][group])
            matrix = torch.nn.functional.one_hot(index, len(index)).float()
            wrong = (index != expected).float()[:, None] * matrix
            ax.imshow(1 - matrix.numpy(), cmap="gray", vmin=-0.2, vmax=1)
            for i, j in wrong.nonzero().tolist():
                ax.add_patch(_square(i, j))
            ax.set(title=f"{name}" if row == 0 else "", xticks=[], yticks=[])
            ax.set_xlabel(f"{int(wrong.sum())} of {len(index)} wrong" if name != "expected" else "")
        axes[row][0].set_ylabel(f"hidden layer {row + 1}")
    save_figure(figure, folder / "matrices")


def _square(i: int, j: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor="C3")
