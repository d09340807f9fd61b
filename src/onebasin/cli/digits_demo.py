"""``make demo``: train two small networks on the digits, align them by each method, measure the loss on the line between.

First it shows the symmetry: a random permutation changes the weights but not the outputs. Then it prints a table: for each
method the distance of the weights, the barrier on the line, and the midpoint accuracy.
"""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """What a method did: the alignment, if it is one, and the line between the networks.

    Attributes:
        name: of the method.
        permutation: of the second network.
        distance: of the weights, squared.
        path: the line on test images.
        seconds: of the processor that the alignment took.
    """

    name: str
    permutation: ob.Permutation | None
    distance: float
    path: ob.LinearPath
    seconds: float

    @property
    def middle(self) -> float:
        """Midpoint accuracy."""
        return self.path.metrics["accuracy"][len(self.path.weights) // 2]


def train_pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """Two small networks that differ in their start and in the order of their data."""
    images, labels = digits("train")
    networks = []
    for number in (seed, seed + 1):
        torch.manual_seed(number)
        networks.append(train(make_mlp(), images, labels, number))
    return networks[0], networks[1]


def compare_methods(a: nn.Module, b: nn.Module) -> Iterator[Row]:
    """Align the second network to the first by every method, one after the other."""
    images, labels = digits("train")
    batches = list(zip(images.split(200), labels.split(200), strict=True))
    criterion = nn.functional.cross_entropy
    descent = {"method": "sinkhorn", "data": batches, "init": "weight-matching", "steps": 60}
    line = ob.RandomPoint(criterion, low=0.3, high=0.7)
    runs: dict[str, dict[str, Any]] = {
        "weight matching": {"method": "weight-matching"},
        "activation matching": {"method": "activation-matching", "data": batches},
        "straight-through": {"method": "ste", "objective": ob.Midpoint(criterion), "data": batches, "steps": 40},
        "Sinkhorn, midpoint": {"objective": ob.Midpoint(criterion), **descent},
        "Sinkhorn, random point": {"objective": ob.RandomPoint(criterion), **descent},
        "auto, without data": {},
        "auto, midpoint": {"objective": ob.Midpoint(criterion), "data": batches},
        "auto, with scales": {"objective": line, "data": batches, "kinds": "positive"},
    }
    yield measure_row("as they are", a, b, None)
    for name, arguments in runs.items():
        yield measure_row(name, a, b, functools.partial(ob.align, b, to=a, example_inputs=images[:2], **arguments))


def measure_row(name: str, a: nn.Module, b: nn.Module, align: Callable[[], ob.Alignment[nn.Module]] | None) -> Row:
    """Align, or leave the second network as it is, and measure the line."""
    begin = time.process_time()
    result = None if align is None else align()
    seconds = time.process_time() - begin
    model = b if result is None else result.model
    path = ob.linear_path(a, model, _make_evaluation(), num_points=21)
    distance = float(ob.WeightDistance().bind(a)(model.state_dict(), a.state_dict()))
    return Row(name, result and result.permutation, distance, path, seconds)


def _make_evaluation() -> Callable[[nn.Module], dict[str, float]]:
    return mean_loss(nn.functional.cross_entropy, [digits("test")])


def run(out: Path, seed: int) -> None:
    """Print the table, and draw the curves into the folder `out`."""
    begin = time.perf_counter()
    torch.set_num_threads(1)  # networks this small gain nothing from threads, and lose time if other processes run
    show_symmetry()
    a, b = train_pair(seed)
    first, second = (_make_evaluation()(model)["accuracy"] for model in (a, b))
    print(f"Two networks trained on the digits, test accuracy {first:.1%} and {second:.1%}.")
    print(f"{'':24}{'L2 distance':>12}{'barrier':>9}{'AUC':>8}{'midpoint':>10}{'seconds':>9}")
    rows = []
    for row in compare_methods(a, b):
        rows.append(row)
        seconds = f"{row.seconds:9.1f}" if row.permutation else ""
        print(
            f"{row.name:24}{row.distance:12.1f}{row.path.barrier:9.3f}{row.path.auc:8.3f}{row.middle:10.1%}{seconds}",
            flush=True,
        )
    print(
        "Scales multiply units so that the line between the networks is lower; the distance of the weights grows with them."
    )
    permutation = rows[-1].permutation
    assert permutation is not None
    _draw({row.name: row.path for row in rows}, permutation[next(iter(permutation.symmetry.groups))], out)
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
