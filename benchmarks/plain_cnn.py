"""The default on deeper networks: three pairs of a plain CNN of six layers, on small MNIST images.

    python -m benchmarks.plain_cnn --data DATA

trains six networks, 6 s each on one core, and aligns each pair by activation matching and by the default with an objective,
with and without its sharp descent; a minute per pair. Each pair is a record in results/plain-cnn.jsonl; the table with the
test accuracy of the midpoints after repair, and with what each method of the default did to the cost, is drawn from them in
results/plain-cnn.md. Pairs that have a record are not measured again.
"""

import argparse
import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from benchmarks.pipelines import SHORTER, align_in_turn
from benchmarks.records import Record, complete, tabulate, write_page
from onebasin import datasets
from onebasin.landscape.evaluation import mean_loss
from onebasin.symmetries import Permutation

CRITERION = nn.functional.cross_entropy
PAIRS = (0, 2, 4)
NUM_TRAINING = 10_000
"""Images that networks are trained and aligned on; those after them in the file are for judging."""
Batches = list[tuple[Tensor, Tensor]]


def make_cnn() -> nn.Module:
    """Five convolutions without norms and a classifier."""
    layers: list[nn.Module] = []
    previous = 1
    for number, width in enumerate((16, 16, 32, 32, 32)):
        convolution = nn.Conv2d(previous, width, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight)
        layers += [convolution, nn.ReLU(), *([nn.MaxPool2d(2)] if number in (1, 3) else [])]
        previous = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 10))


@functools.cache
def load_images(split: str, limit: int) -> tuple[Tensor, Tensor]:
    """MNIST at half its resolution."""
    images, labels = datasets.mnist(split)  # type: ignore[arg-type]
    images = nn.functional.avg_pool2d(images[:limit].float().view(-1, 1, 28, 28) / 255, 2)
    return (images - 0.13) / 0.27, labels[:limit]


def load_batches(begin: int, end: int) -> Batches:
    """Some of the training images, in batches of 250."""
    images, labels = load_images("train", end)
    return list(zip(images[begin:].split(250), labels[begin:].split(250), strict=True))


def train(seed: int, images: Tensor, labels: Tensor, epochs: int = 6, rate: float = 3e-3) -> nn.Module:
    """Adam on batches of 100, its rate falling to zero."""
    torch.manual_seed(seed)
    model = make_cnn()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    steps = epochs * len(images) // 100
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            CRITERION(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


class Pair(NamedTuple):
    """Two networks, the second to be aligned to the first.

    Attributes:
        a: the first.
        b: the second.
        symmetry: of both.
        batches: that they were trained on.
    """

    a: nn.Module
    b: nn.Module
    symmetry: ob.Symmetry
    batches: Batches

    def average(self, permutation: Permutation | None) -> nn.Module:
        """The midpoint, repaired."""
        moved, middle = copy.deepcopy(self.b), copy.deepcopy(self.a)
        if permutation is not None:
            moved.load_state_dict(permutation.apply(self.b))
        middle.load_state_dict(ob.interpolate([self.a, moved], [0.5, 0.5]))
        fixed = ob.repair(middle, [self.a, moved], self.batches, self.symmetry, tolerance=float("inf"))
        middle.load_state_dict(fixed.state)
        return middle


@functools.cache
def make_pair(seed: int) -> Pair:
    """Trained with this seed and the next."""
    images, labels = load_images("train", NUM_TRAINING)
    a, b = train(seed, images, labels), train(seed + 1, images, labels)
    return Pair(a, b, ob.symmetry(a, images[:2]), load_batches(0, NUM_TRAINING))


def measure_accuracy(model: nn.Module) -> float:
    """On 4,000 test images."""
    return mean_loss(CRITERION, [load_images("test", 4000)])(model)["accuracy"]


def measure(config: Record) -> Record:
    """Align a pair by activation matching and by the default, and measure the midpoints."""
    pair = make_pair(config["pair"])
    midpoint = ob.Midpoint(CRITERION, repaired=True)
    goal: dict[str, Any] = {"objective": midpoint, "symmetry": pair.symmetry, "data": pair.batches}
    shorter = SHORTER["without the sharp descent"]
    ways: dict[str, Callable[[], ob.Alignment[Any]]] = {
        "activation matching": lambda: align_in_turn(pair.b, pair.a, shorter[:1], **goal),
        "without the sharp descent": lambda: align_in_turn(pair.b, pair.a, shorter, **goal),
        "the default": lambda: ob.align(pair.b, to=pair.a, **goal),
    }
    record: Record = {"ends": [measure_accuracy(model) for model in (pair.a, pair.b)]}
    for name, align in ways.items():
        begin = time.process_time()
        found = align()
        seconds = time.process_time() - begin
        accuracy = measure_accuracy(pair.average(found.permutation))
        record[name] = {"accuracy": accuracy, "cost": found.cost, "seconds": seconds, "notes": list(found.notes[1:])}
    return record


def draw(records: Sequence[Record]) -> list[str]:
    """The lines of the page."""
    names = ["activation matching", "without the sharp descent", "the default"]
    rows = []
    for record in records:
        result = record["result"]
        ends = ", ".join(f"{end:.2%}" for end in result["ends"])
        middles = [f"{result[name]['accuracy']:.2%}" for name in names]
        seconds = [f"{result[name]['seconds']:.0f}" for name in names[1:]]
        rows.append([str(record["config"]["pair"]), ends, *middles, *seconds, " ".join(result["the default"]["notes"])])
    means = [sum(r["result"][name]["accuracy"] for r in records) / len(records) for name in names]
    head = ["pair", "ends", *names, "seconds without it", "seconds of the default", "what the default did"]
    return [
        "# The default on a plain CNN of six layers", "",
        f"**Mean midpoint accuracy after repair: {', '.join(f'{n} {m:.2%}' for n, m in zip(names, means, strict=True))}.**",
        "", "`python -m benchmarks.plain_cnn`; accuracy on 4,000 test images, seconds of one core.", "",
        *tabulate(head, rows),
    ]  # fmt: skip


def main() -> None:
    """Measure the pairs that have no record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST/raw (or set ONEBASIN_DATA)")
    parser.add_argument("--out", type=Path, default=Path("results/plain-cnn.jsonl"), help="the records")
    options = parser.parse_args()
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    records = complete(options.out, [{"pair": seed} for seed in PAIRS], measure)
    write_page(options.out.with_suffix(".md"), draw(records), records)


if __name__ == "__main__":
    main()
