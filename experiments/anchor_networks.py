"""The networks of the published results on merging, and their training by the published recipes (SGD, CIFAR-10).

VGG and ResNet-20 as in REPAIR (Jordan et al. 2022): plain VGG with PyTorch's own start, ResNet-20 with 3 x 3 convolutions in
its shortcuts. On a GPU the steps of several networks are captured as graphs and replayed side by side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.frame import identify
from experiments.networks import VGG_LAYERS
from onebasin import datasets
from onebasin.tensors.files import write_atomically

MEAN, STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)
BATCH = 500
STORED = Path(__file__).parent / "stored"
"""Trained networks in half precision."""


@dataclass(frozen=True)
class Recipe:
    """How networks are made and trained.

    Attributes:
        network: "vgg11", "vgg16", with "-bn" for batch norm, or "resnet20".
        width: factor on all channels.
        epochs: over the training images.
        lr: the highest, after five epochs of warm-up.
        weight_decay: of all parameters.
        decay: of the rate after the warm-up, "linear" or "cosine".
        cutout: side of the square that is cut out of each image.
    """

    network: str
    width: int = 1
    epochs: int = 100
    lr: float = 0.08
    weight_decay: float = 5e-4
    decay: str = "linear"
    cutout: int = 0


RECIPES = {
    "vgg11": Recipe("vgg11"),
    "vgg16": Recipe("vgg16"),
    "vgg11-bn-2x": Recipe("vgg11-bn", 2),
    "resnet20-short": Recipe("resnet20", 1, 100, 0.4),
    "resnet20-4x-short": Recipe("resnet20", 4, 100, 0.4),
    "resnet20-long": Recipe("resnet20", 1, 250, 0.4, 1e-4, "cosine", 12),
    "resnet20-2x-long": Recipe("resnet20", 2, 250, 0.4, 1e-4, "cosine", 12),
    "resnet20-4x-long": Recipe("resnet20", 4, 250, 0.4, 1e-4, "cosine", 12),
}


def make_network(recipe: Recipe) -> nn.Module:
    """A network with random weights, from torch's global generator."""
    if recipe.network == "resnet20":
        return ResNet20(16 * recipe.width)
    name, _, norm = recipe.network.partition("-")
    layers: list[nn.Module] = []
    previous = 3
    for word in VGG_LAYERS[name].split():
        if word == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        channels = int(word) * recipe.width
        layers.append(nn.Conv2d(previous, channels, 3, padding=1))
        layers += [nn.BatchNorm2d(channels), nn.ReLU()] if norm else [nn.ReLU()]
        previous = channels
    if name == "vgg16" and not norm:  # as in the work whose numbers we compare with: else it does not train
        for layer in layers:
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(previous, 10))


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out))
        self.shortcut = shortcut if stride > 1 else nn.Identity()
        self.out = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class ResNet20(nn.Module):
    """Three stages of three blocks, `width` channels in the first stage, Kaiming's normal start."""

    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, previous = [], width
        for stage in range(3):
            for number in range(3):
                blocks.append(_Block(previous, width << stage, 2 if stage and not number else 1))
                previous = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(previous, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def load_images(split: str, device: str) -> tuple[Tensor, Tensor]:
    """CIFAR-10 with the mean and deviation of the recipes: float32 images and labels."""
    images, labels = datasets.cifar10(split)  # type: ignore[arg-type]
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return (images.to(device).float() - mean) / std, labels.to(device)


def augment(images: Tensor, cutout: int = 0) -> Tensor:
    """Every image shifted by up to four pixels, mirrored or not, and with a square cut out, each on its own."""
    num, _, height, width = images.shape
    device = images.device
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    shift = torch.randint(0, 9, (2, num, 1), device=device)
    rows, columns = (s + torch.arange(n, device=device) for s, n in zip(shift, (height, width), strict=True))
    columns = torch.where(torch.rand(num, 1, device=device) < 0.5, columns.flip(1), columns)
    each = torch.arange(num, device=device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if not cutout:
        return moved
    center = torch.randint(0, height, (2, num, 1), device=device)
    inside = [(torch.arange(height, device=device) - c + cutout // 2) for c in center]
    hole = ((inside[0] >= 0) & (inside[0] < cutout))[:, :, None] & ((inside[1] >= 0) & (inside[1] < cutout))[:, None, :]
    return moved.masked_fill(hole.unsqueeze(1), 0)


class Training:
    """One network on its way; a step needs nothing from the host, so that a CUDA graph can hold it."""

    def __init__(self, recipe: Recipe, seed: int, images: Tensor, labels: Tensor):
        torch.manual_seed(seed)
        device = images.device
        self.recipe, self.images, self.labels = recipe, images, labels
        self.model = make_network(recipe).to(device)
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)
        self.steps_per_epoch = len(images) // BATCH
        self.num_steps = recipe.epochs * self.steps_per_epoch
        rates = [_rate(recipe, step / self.steps_per_epoch) for step in range(self.num_steps)]
        self.rates, self.rate = torch.tensor(rates, device=device), torch.zeros((), device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.order = torch.zeros(self.steps_per_epoch, BATCH, dtype=torch.long, device=device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), self.rate, momentum=0.9, weight_decay=recipe.weight_decay, fused=True
        )
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.generator = torch.Generator(device).manual_seed(seed)

    def shuffle(self) -> None:
        """Draw the order of an epoch."""
        drawn = torch.randperm(len(self.images), generator=self.generator, device=self.images.device)
        self.order.copy_(drawn[: self.order.numel()].view_as(self.order))

    def step(self) -> None:
        """One step of SGD."""
        self.rate.copy_(self.rates[self.position].squeeze(0))
        index = self.order[self.position % self.steps_per_epoch].squeeze(0)
        self.position += 1
        loss_of = _compiled_loss if self.images.is_cuda else _loss
        loss = loss_of(self.model, self.images[index], self.labels[index], self.recipe.cutout)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def make_replay(self) -> Callable[[], None]:
        """A step as a graph; on the CPU the step itself."""
        if self.stream is None:
            return self.step
        torch.backends.cudnn.benchmark = True
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.shuffle()
            for _ in range(3):
                self.step()
            self.position.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step()
        return graph.replay


def _loss(model: nn.Module, images: Tensor, labels: Tensor, cutout: int) -> Tensor:
    """Of a batch, augmented anew; on a GPU in bfloat16."""
    x, on_gpu = augment(images, cutout), images.is_cuda
    x = x.contiguous(memory_format=torch.channels_last) if on_gpu else x
    with torch.autocast(images.device.type, torch.bfloat16, enabled=on_gpu):
        return nn.functional.cross_entropy(model(x), labels)


_compiled_loss = torch.compile(_loss, fullgraph=True, dynamic=False)  # networks of one recipe share what is compiled


def _rate(recipe: Recipe, epoch: float) -> float:
    """Five epochs of warm-up, then down to zero."""
    warm = min(5, recipe.epochs / 2)
    if epoch < warm:
        return recipe.lr * epoch / warm
    left = (epoch - warm) / (recipe.epochs - warm)
    return recipe.lr * ((1 - left) if recipe.decay == "linear" else (1 + math.cos(math.pi * left)) / 2)


def train_side_by_side(recipe: Recipe, seeds: Sequence[int], images: Tensor, labels: Tensor) -> list[nn.Module]:
    """Networks of one recipe, one per seed, in eval mode; each on a stream of its own."""
    runs = [Training(recipe, seed, images, labels) for seed in seeds]
    for run in runs:
        run.model.train()
    replays = [run.make_replay() for run in runs]
    for _ in range(recipe.epochs):
        for run in runs:
            with torch.cuda.stream(run.stream):
                run.shuffle()
        for _ in range(runs[0].steps_per_epoch):
            for run, replay in zip(runs, replays, strict=True):
                with torch.cuda.stream(run.stream):
                    replay()
    if images.is_cuda:
        torch.cuda.synchronize()
    return [run.model.to(memory_format=torch.contiguous_format).eval() for run in runs]


def trained_networks(recipe: Recipe, seeds: Sequence[int], device: str, run: int = 1) -> list[nn.Module]:
    """`train_side_by_side`, or what an earlier call with the same arguments has stored under ``experiments-output``.

    Training on a GPU is not deterministic: the networks of another `run` are others, of the same seeds too. Some that
    records were made with are part of the repository, in `STORED`.
    """
    paths = []
    for seed in seeds:
        described = identify({**asdict(recipe), "seed": seed, **({"run": run} if run > 1 else {})})
        name = hashlib.sha256(described.encode()).hexdigest()[:16]
        path, stored = Path("experiments-output/anchors", f"{name}.pt"), STORED / f"{name}.safetensors"
        paths.append(stored if stored.is_file() and not path.is_file() else path)
    missing = [(seed, path) for seed, path in zip(seeds, paths, strict=True) if not path.is_file()]
    if missing:
        images, labels = load_images("train", device)
        for (_, path), model in zip(
            missing, train_side_by_side(recipe, [s for s, _ in missing], images, labels), strict=True
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file, model=model: torch.save(model.state_dict(), file))
    models = []
    for path in paths:
        is_stored = path.parent == STORED
        model = make_network(recipe).to(device)
        model.load_state_dict(load_file(path) if is_stored else torch.load(path, map_location=device, weights_only=True))
        models.append(model.eval())
    return models
