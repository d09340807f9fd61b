"""``make demo``: train two small networks on the digits, align them by each method, measure the loss on the line between.

First it shows the symmetry: a random permutation changes the weights but not the outputs. Then it prints a table: for each
method the distance of the weights, the barrier on the line, and the accuracy of the network half way.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.datasets import digits
from onebasin.landscape.evaluation import mean_loss
from onebasin.plots import plot_paths, plot_permutation


class ResidualCNN(nn.Module):
    """Two convolutions around a shortcut, batch norms, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv1 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) to logits."""
        x = torch.relu(self.norm1(self.stem(x)))
        x = x + self.conv2(torch.relu(self.norm2(self.conv1(x))))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def make_mlp(width: int = 32) -> nn.Module:
    """Two hidden layers."""
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def train(model: nn.Module, images: Tensor, labels: Tensor, seed: int, epochs: int = 30, lr: float = 5e-3) -> nn.Module:
    """Adam on shuffled batches of 100."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model.eval()


def show_symmetry() -> None:
    """A residual network: what is free, and that moving it changes nothing."""
    torch.manual_seed(0)
    model, images = ResidualCNN().double().eval(), torch.rand(64, 1, 8, 8, dtype=torch.float64)
    symmetry = ob.symmetry(model, images)
    print(f"The symmetry of a small residual network: {symmetry}")
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    moved = permutation.apply(model)
    with torch.no_grad():
        before, after = model(images), torch.func.functional_call(model, moved, images)
    distance = sum(float((value - moved[key]).abs().sum()) for key, value in model.state_dict().items())
    change = float((before - after).abs().max())
    print(
        f"\nA random permutation of it moved the weights by {distance:.1f} (L1) and the outputs by at most {change:.1e}.\n"
    )


def run(out: Path, seed: int) -> None:
    """Print the table, and draw the curves into the folder `out`."""
    begin = time.perf_counter()
    torch.set_num_threads(1)  # networks this small gain nothing from threads, and lose time if other processes run
    show_symmetry()
    images, labels = digits("train")
    test_images, test_labels = digits("test")
    networks = []
    for number in (seed, seed + 1):
        torch.manual_seed(number)
        networks.append(train(make_mlp(), images, labels, number))
    a, b = networks
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    criterion = nn.functional.cross_entropy
    evaluate = mean_loss(criterion, [(test_images, test_labels)])
    symmetry = ob.symmetry(a, images[:2])
    descent = {"method": "sinkhorn", "data": batches, "init": "weight-matching", "steps": 60}
    runs: dict[str, dict[str, Any]] = {
        "weight matching": {"method": "weight-matching"},
        "activation matching": {"method": "activation-matching", "data": batches},
        "straight-through": {"method": "ste", "objective": ob.Midpoint(criterion), "data": batches, "steps": 40},
        "Sinkhorn, L2": {"method": "sinkhorn"},
        "Sinkhorn, midpoint": {"objective": ob.Midpoint(criterion), **descent},
        "Sinkhorn, random point": {"objective": ob.RandomPoint(criterion), **descent},
    }
    print(
        f"Two networks trained on the digits, test accuracy {evaluate(a)['accuracy']:.1%} and {evaluate(b)['accuracy']:.1%}."
    )
    print(f"{'':24}{'L2 distance':>12}{'barrier':>9}{'AUC':>8}{'midpoint':>10}{'seconds':>9}")
    paths, distance = {}, ob.WeightDistance().bind(a)
    permutation = symmetry.identity()
    for name, arguments in {"as they are": None, **runs}.items():
        result = None if arguments is None else ob.align(b, to=a, symmetry=symmetry, **arguments)
        model = b if result is None else result.model
        permutation = permutation if result is None else result.permutation
        path = paths[name] = ob.linear_path(a, model, evaluate, num_points=21)
        cost = float(distance(model.state_dict(), a.state_dict()))
        middle = path.metrics["accuracy"][10]
        seconds = "" if result is None else f"{result.seconds:9.1f}"
        print(f"{name:24}{cost:12.1f}{path.barrier:9.3f}{path.auc:8.3f}{middle:10.1%}{seconds}", flush=True)
    _draw(paths, permutation[next(iter(symmetry.groups))], out)
    print(f"{time.perf_counter() - begin:.0f} s in all")


def _draw(paths: dict[str, ob.LinearPath], index: Tensor, folder: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("for pictures: pip install 'onebasin[plots]'")
        return
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    plot_paths(paths, ax=left)
    left.legend(loc="upper left", fontsize=8, frameon=False)
    left.set_title("Test loss on the line between the two networks")
    plot_permutation(index, ax=right)
    right.set_title("A permutation matrix: the first hidden layer")
    for ending in ("svg", "png"):
        figure.savefig(folder / f"demo.{ending}", dpi=150)
    print(f"the curves and a permutation matrix: {folder / 'demo.png'}")
