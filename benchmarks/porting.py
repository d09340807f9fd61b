"""Fine-tunes carried from one network to another that was trained apart, on the digits: ``python -m benchmarks.porting``.

Two networks are trained on the digits. One of them is trained further on images that were changed (turned, mirrored,
inverted, shifted or blurred), and what that changed is added to the other: as it is, or moved by the alignment of the two.
For each change the accuracy on changed and on unchanged test images, beside training the other network further itself, on
all images or on a few per class. The change is added with a scale of one. About five minutes on one core.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.cli.digits_demo import make_mlp, train
from onebasin.datasets import digits

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.rot90(1, (-2, -1)),
    "mirrored": lambda x: x.flip(-1),
    "inverted": lambda x: x.amax() - x,
    "shifted": lambda x: x.roll(2, -1),
    "blurred": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1),
}
FEW = (1, 5, 25)


def make_cnn(width: int = 32) -> nn.Module:
    """Three convolutions without norms, a mean over the image, a classifier."""
    layers: list[nn.Module] = []
    for channels in (1, width, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))


def choose(labels: Tensor, per_class: int) -> Tensor:
    """The first few images of each class."""
    return torch.cat([(labels == number).nonzero().flatten()[:per_class] for number in range(10)])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that are classified right, in percent."""
    with torch.no_grad():
        return 100 * float((model(images).argmax(-1) == labels).float().mean())


def main() -> None:
    """Train, port, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of networks (default 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = digits("train")
    test_images, test_labels = digits("test")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    ways: dict[str, dict[str, Any]] = {
        "ported, permutations without data": {},
        "ported, permutations learned": {"objective": ob.Midpoint(nn.functional.cross_entropy), "data": batches},
    }
    print("| network | change | result on NEW | changed images | unchanged images | share of the gain |")
    print("|---|---|---|---|---|---|")
    for network, make in {"MLP 2 x 128": lambda: make_mlp(128), "CNN 3 x 32": make_cnn}.items():
        shares: dict[str, list[float]] = {}
        for change, function in CHANGES.items():
            rows: dict[str, list[tuple[float, float]]] = {}
            for pair in range(options.pairs):
                bases = []
                for seed in (2 * pair, 2 * pair + 1):
                    torch.manual_seed(seed)
                    bases.append(train(make(), images, labels, seed, epochs=20, lr=2e-3))
                old, new = bases

                def refine(model: nn.Module, chosen: Tensor, epochs: int, function: Any = function) -> nn.Module:
                    return train(copy.deepcopy(model), function(images[chosen]), labels[chosen], 0, epochs, lr=1e-3)

                every = torch.arange(len(images))
                fine = refine(old, every, 15)
                naive = copy.deepcopy(new)
                naive.load_state_dict(ob.interpolate([new, fine, old], [1, 1, -1]))
                results = {"NEW as it is": new, "added as it is": naive}
                for name, arguments in ways.items():
                    results[name] = ob.port(fine, base=old, to=new, example_inputs=images[:2], **arguments).model
                for count in FEW:
                    results[f"NEW trained on {count} per class"] = refine(new, choose(labels, count), 50)
                results["NEW trained on all images"] = refine(new, every, 15)
                for name, model in results.items():
                    found = [accuracy(model, x, test_labels) for x in (function(test_images), test_images)]
                    rows.setdefault(name, []).append((found[0], found[1]))
            means = {name: [statistics.mean(column) for column in zip(*found, strict=True)] for name, found in rows.items()}
            start, end = means["NEW as it is"][0], means["NEW trained on all images"][0]
            for name, (changed, unchanged) in means.items():
                shares.setdefault(name, []).append((changed - start) / (end - start))
                cells = (network, change, name, f"{changed:.1f}", f"{unchanged:.1f}", f"{shares[name][-1]:.2f}")
                print(f"| {' | '.join(cells)} |", flush=True)
        for name, found in shares.items():
            print(f"| {network} | mean of {len(found)} | {name} |  |  | {statistics.mean(found):.2f} |", flush=True)


if __name__ == "__main__":
    main()
