"""Small vision transformers trained apart on the digits, aligned by permutations and by all kinds of symmetry.

    python -m benchmarks.rotations [--pairs N] [--steps N] [--rows START]
    python -m benchmarks.rotations --three
    python -m benchmarks.rotations --both [--pairs N]
    python -m benchmarks.rotations --together [--pairs N] [--steps N]
    python -m benchmarks.rotations --weighing [--pairs N]

trains pairs of transformers of three blocks on the embedded digits and prints, for each way to align them, the barrier on
the line between them on test images, the midpoint accuracy, the largest change of an output of the moved end in float64
(relative to the largest output) and the largest condition number of a basis; six minutes per pair on one core. With --three,
the highest barrier on a grid of 15 points between three of them, aligned to the first or all at once; eight minutes. With
--both, one end of each pair is moved, or both; two minutes a pair. With --together, permutations are learned in the same
steps as bases, or stay as they start; four minutes a pair. With --weighing, weight matching of all kinds with each tensor
divided by a number before rotations are chosen; two minutes a pair.
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from scipy import stats
from torch import Tensor, nn

import onebasin as ob
from benchmarks.digits import VisionTransformer
from experiments.kept_functions import measure_end
from onebasin.datasets import digits
from onebasin.landscape.evaluation import mean_loss
from onebasin.landscape.paths import Evaluate
from onebasin.matching.closest_transforms import ClosestTransforms

CRITERION = nn.functional.cross_entropy
DIVISORS: dict[str, Callable[[Tensor, Tensor, int], float]] = {
    "nothing": lambda ours, theirs, size: 1.0,
    "the root of its columns": lambda ours, theirs, size: (ours.numel() / size) ** 0.5,
    "its norm": lambda ours, theirs, size: float(ours.norm() * theirs.norm()) ** 0.5,
    "the root of its norm": lambda ours, theirs, size: float(ours.norm() * theirs.norm()) ** 0.25,
}
"""What a tensor is divided by, from both networks' and the number of units that a rotation mixes; a tensor's columns are its
entries per unit."""


def train(seed: int, epochs: int = 60, rate: float = 3e-3, width: int = 32) -> nn.Module:
    """AdamW on batches of 100, with a warm-up of 50 steps and a linear decay."""
    images, labels = digits("train")
    torch.manual_seed(seed)
    model = VisionTransformer(width, num_blocks=3, expansion=2)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    steps = epochs * -(-len(images) // 100)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 50) * (1 - n / steps))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            CRITERION(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def measure_three(line: dict[str, Any], steps: int) -> None:
    """Print what is between three networks that are aligned to the first of them, or all at once."""
    models, (images, labels) = [train(seed) for seed in range(3)], digits("test")
    grid = [(4 - i - j, i, j) for i in range(5) for j in range(5 - i)]
    middle = copy.deepcopy(models[0])
    print("| three networks, all kinds learned | highest barrier on the simplex | accuracy there, lowest | at the corners |")
    print("|---|---|---|---|")
    for reference, label in {"first": "each towards the first", "common": "all at once"}.items():
        found: list[ob.Transform] = []
        options = {"kinds": "all", "scaling": ob.Scaling(steps=steps), "on_aligned": found.extend, **line}
        ob.merge(models, images[:2], reference=reference, **options)
        states = [each.apply(ob.canonical(model, images[:2]).state) for each, model in zip(found, models, strict=True)]
        losses, accuracies = {}, {}
        for shares in grid:
            mixed = {key: sum(s / 4 * state[key] for s, state in zip(shares, states, strict=True)) for key in states[0]}
            middle.load_state_dict(mixed)
            with torch.no_grad():
                output = middle(images)
            losses[shares] = float(CRITERION(output, labels))
            accuracies[shares] = float((output.argmax(-1) == labels).float().mean())
        corners = [(4, 0, 0), (0, 4, 0), (0, 0, 4)]
        above = [
            losses[shares] - sum(s / 4 * losses[corner] for s, corner in zip(shares, corners, strict=True))
            for shares in grid
        ]
        ends = ", ".join(f"{accuracies[corner]:.1%}" for corner in corners)
        print(f"| {label} | {max(above):.3f} | {min(accuracies.values()):.1%} | {ends} |")


def measure_both(line: dict[str, Any], pairs: int, evaluate: Evaluate) -> None:
    """Print what learning leaves if one end of a line moves, at one or two times the rate, or both do."""
    rate = ob.Scaling().basis_lr
    ways = {"one end": {}, "one end, twice the rate": {"basis_lr": 2 * rate}, "both ends": {"both": True}}
    rows = {(steps, name): [] for steps in (50, 200) for name in ways}
    for number in range(pairs):
        a, b = train(2 * number), train(2 * number + 1)
        start = ob.align(b, to=a, kinds="all", scaling=ob.Scaling(steps=0), **line).transform
        given = {"kinds": "all", "init": start, **line}
        for steps, name in rows:
            found = ob.align(b, to=a, scaling=ob.Scaling(steps=steps, **ways[name]), **given)
            path = ob.linear_path(found.target, found.model, evaluate, num_points=11)
            rows[steps, name].append((path.barrier, found.cost))
    print("| steps | what moves | test barrier, each pair | mean | training loss on the line |\n|---|---|---|---|---|")
    for (steps, name), found in rows.items():
        barriers, costs = zip(*found, strict=True)
        each = ", ".join(f"{barrier:.3f}" for barrier in barriers)
        print(f"| {steps} | {name} | {each} | {statistics.mean(barriers):.3f} | {statistics.mean(costs):.3f} |")


def learn_together(a: nn.Module, b: nn.Module, start: ob.Transform, line: dict[str, Any], steps: int, rate: float) -> Any:
    """The transform of b after steps of Adam on the bases, with a falling rate, and on logits, unless their rate is zero."""
    net = ob.RebasinNet(b, start.symmetry, init=start, mass=0.99)
    parts = [{"params": net.generators.parameters(), "lr": ob.Scaling().basis_lr}]
    parts += [{"params": net.logits.parameters(), "lr": rate}] if rate else []
    optimizer = torch.optim.Adam(parts)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / steps)
    cost, target = line["objective"].bind(a), dict(a.named_parameters())
    stream = itertools.cycle(line["data"])
    for _ in range(steps):
        optimizer.zero_grad()
        cost(net(), {**a.state_dict(), **target}, next(stream)).backward()
        optimizer.step()
        schedule.step()
    return net.transform()


def measure_together(line: dict[str, Any], pairs: int, steps: int, evaluate: Evaluate) -> None:
    """Print what is left if permutations stay as activation matching found them, or are learned with the bases."""
    rows: dict[float, list[tuple[float, float]]] = {rate: [] for rate in (0.0, 0.01, 0.1)}
    images = digits("train")[0]
    for number in range(pairs):
        a, b = (ob.canonical(train(2 * number + i), images[:2]).model for i in range(2))
        start = ob.align(b, to=a, kinds="all", scaling=ob.Scaling(steps=0), **line).transform
        for rate, found in rows.items():
            moved = copy.deepcopy(b)
            moved.load_state_dict(learn_together(a, b, start, line, steps, rate).apply(b))
            path = ob.linear_path(a, moved, evaluate, num_points=11)
            found.append((path.barrier, path.metrics["accuracy"][5]))
    print("| rate of the logits | test barrier, each pair | mean | accuracy at the midpoint |\n|---|---|---|---|")
    for rate, found in rows.items():
        barriers, middles = zip(*found, strict=True)
        each, middle = ", ".join(f"{x:.3f}" for x in barriers), ", ".join(f"{x:.1%}" for x in middles)
        print(f"| {rate or 'permutations stay'} | {each} | {statistics.mean(barriers):.3f} | {middle} |")


def divide_tensors(divisor: Callable[[Tensor, Tensor, int], float]) -> Any:
    """Divides each tensor before it enters the cross products of which rotations are made, while the context lasts."""
    add = ClosestTransforms._add_products

    def add_divided(self: ClosestTransforms, total: Tensor, held: Any, basis: Any, known: Any) -> Tensor:
        for key, ours in held.source.items():
            number = divisor(ours, held.target[key], total.shape[-1]) or 1.0
            held = held._replace(target={key: held.target[key] / number}, source={key: ours / number})
        return add(self, total, held, basis, known)

    return patch.object(ClosestTransforms, "_add_products", add_divided)


def measure_weighing(pairs: int, evaluate: Evaluate) -> None:
    """Print what weight matching leaves if tensors count differently in the rotations, paired with counting as they are."""
    images = digits("train")[0][:2]
    rows: dict[str, list[float]] = {name: [] for name in (*DIVISORS, "nothing, balanced networks")}
    for number in range(pairs):
        ends = [train(2 * number + i) for i in range(2)]
        balanced = [ob.canonical(model, images, balanced=True).model for model in ends]
        for name, found in rows.items():
            a, b = balanced if name not in DIVISORS else ends
            with divide_tensors(DIVISORS.get(name, DIVISORS["nothing"])):
                moved = ob.align(b, to=a, example_inputs=images, kinds="all", scaling=ob.Scaling(steps=0))
            found.append(ob.linear_path(moved.target, moved.model, evaluate, num_points=11).barrier)
    print("| each tensor divided by | test barrier, each pair | mean | lower than undivided | p, Wilcoxon signed-rank |")
    print("|---|---|---|---|---|")
    plain = rows["nothing"]
    for name, found in rows.items():
        each = ", ".join(f"{x:.3f}" for x in found)
        compared = "|"
        if found is not plain:
            lower = sum(x < y for x, y in zip(found, plain, strict=True))
            compared = f"{lower} of {pairs} | {stats.wilcoxon(found, plain).pvalue:.2g}"
        print(f"| {name} | {each} | {statistics.mean(found):.3f} | {compared} |")


def measure_kinds(line: dict[str, Any], pairs: int, steps: int, chosen: str, evaluate: Evaluate) -> None:
    """Print what is left after each way to align a pair, and what it did to the end that it moved."""
    images, batches, test = digits("train")[0][:2], line["data"], digits("test")[0]
    everything: dict[str, Any] = {"kinds": "all", "scaling": ob.Scaling(steps=0)}
    ways: dict[str, dict[str, Any] | None] = {
        "as they are": None,
        "permutations: weight matching": {"method": "weight-matching"},
        "permutations: Sinkhorn L2": {},
        "permutations: activation matching": {"data": batches},
        "permutations: the default on the midpoint": {"objective": ob.Midpoint(CRITERION), "data": batches},
        "all kinds: weight matching": everything,
        "all kinds: activation matching": {**everything, **line},
        "all kinds: learned": {**everything, **line, "scaling": ob.Scaling(steps=steps)},
    }
    ways = {name: arguments for name, arguments in ways.items() if name.startswith(chosen)}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    ends = []
    for number in range(pairs):
        a, b = train(2 * number), train(2 * number + 1)
        ends += [evaluate(model)["accuracy"] for model in (a, b)]
        for name, arguments in ways.items():
            begin = time.perf_counter()
            found = None if arguments is None else ob.align(b, to=a, example_inputs=images, **arguments)
            row = {"seconds": time.perf_counter() - begin, **measure_end(b, found, test)}
            path = ob.linear_path(*((a, b) if found is None else (found.target, found.model)), evaluate, num_points=11)
            rows[name].append({"barrier": path.barrier, "middle": path.metrics["accuracy"][5], **row})
    print(f"Test accuracy of the ends: {', '.join(f'{end:.1%}' for end in ends)}.\n")
    print("| aligned by | test barrier, each pair | mean | midpoint accuracy | change in float64 | condition | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, found in rows.items():
        each, middle = ", ".join(f"{x['barrier']:.3f}" for x in found), ", ".join(f"{x['middle']:.1%}" for x in found)
        barrier, seconds = (statistics.mean(x[key] for x in found) for key in ("barrier", "seconds"))
        change, condition = (max(x[key] for x in found) for key in ("change in float64", "condition"))
        print(f"| {name} | {each} | {barrier:.3f} | {middle} | {change:.1e} | {condition:.1f} | {seconds:.0f} |", flush=True)


def main() -> None:
    """Train, align, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of networks (default 3)")
    parser.add_argument("--steps", type=int, default=600, help="steps that bases are learned for (default 600)")
    parser.add_argument("--rows", default="", help='only rows whose names start so, such as "all kinds" (default: all)')
    parser.add_argument("--three", action="store_true", help="merge three at once instead")
    parser.add_argument("--both", action="store_true", help="move one end or both instead")
    parser.add_argument("--together", action="store_true", help="learn permutations with the bases instead")
    parser.add_argument("--weighing", action="store_true", help="divide tensors before rotations are chosen instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = digits("train")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    evaluate = mean_loss(CRITERION, [digits("test")])
    line = {"objective": ob.RandomPoint(CRITERION, low=0.4, high=0.6), "data": batches}
    if options.three:
        measure_three(line, options.steps)
        return
    if options.both:
        measure_both(line, options.pairs, evaluate)
        return
    if options.weighing:
        measure_weighing(options.pairs, evaluate)
        return
    if options.together:
        measure_together(line, options.pairs, options.steps, evaluate)
        return
    measure_kinds(line, options.pairs, options.steps, options.rows, evaluate)


if __name__ == "__main__":
    main()
