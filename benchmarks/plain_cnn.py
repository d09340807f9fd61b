"""The default on deeper networks: three pairs of a plain CNN of six layers, on small MNIST images.

    python -m benchmarks.plain_cnn --data DATA

trains six networks, 15 s each on one core, aligns each pair by activation matching and by the default with an objective, and
prints the test accuracy of the midpoint after repair, with what each method of the default did to the cost.
"""

import argparse
import copy
import os

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin import datasets
from onebasin.landscape.evaluation import mean_loss

CRITERION = nn.functional.cross_entropy


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


def load_images(split: str, limit: int) -> tuple[Tensor, Tensor]:
    """MNIST at half its resolution."""
    images, labels = datasets.mnist(split)  # type: ignore[arg-type]
    images = nn.functional.avg_pool2d(images[:limit].float().view(-1, 1, 28, 28) / 255, 2)
    return (images - 0.13) / 0.27, labels[:limit]


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


def main() -> None:
    """Train, align, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST/raw (or set ONEBASIN_DATA)")
    options = parser.parse_args()
    if options.data:
        os.environ["ONEBASIN_DATA"] = options.data
    torch.set_num_threads(1)
    images, labels = load_images("train", 10_000)
    batches = list(zip(images.split(250), labels.split(250), strict=True))
    evaluate = mean_loss(CRITERION, [load_images("test", 4000)])
    print("| pair | ends | activation matching | the default | seconds | what it did |\n|---|---|---|---|---|---|")
    for seed in (0, 2, 4):
        a, b = train(seed, images, labels), train(seed + 1, images, labels)
        symmetry = ob.symmetry(a, images[:2])
        found = [
            ob.align(b, to=a, symmetry=symmetry, method="activation-matching", data=batches),
            ob.align(b, to=a, symmetry=symmetry, objective=ob.Midpoint(CRITERION, repaired=True), data=batches),
        ]
        middles = []
        for result in found:
            middle = copy.deepcopy(a)
            middle.load_state_dict(ob.interpolate([a, result.model], [0.5, 0.5]))
            fixed = ob.repair(middle, [a, result.model], batches, symmetry, tolerance=float("inf"))
            middle.load_state_dict(fixed.state)
            middles.append(f"{evaluate(middle)['accuracy']:.2%}")
        ends = ", ".join(f"{evaluate(model)['accuracy']:.2%}" for model in (a, b))
        print(
            f"| {seed} | {ends} | {' | '.join(middles)} | {found[1].seconds:.0f} | {' '.join(found[1].notes[1:])} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
