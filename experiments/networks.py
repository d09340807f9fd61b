"""The deep networks of the paper and two it could not do, and their training on images."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.digits import VisionTransformer
from experiments.frame import identify
from experiments.tasks import Data
from onebasin import datasets
from onebasin.descent.cuda_graphs import CapturedStep
from onebasin.tensors.files import write_atomically

VGG_LAYERS = {
    "vgg11": "64 M 128 M 256 256 M 512 512 M 512 512 M",
    "vgg13": "64 64 M 128 128 M 256 256 M 512 512 M 512 512 M",
    "vgg16": "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    "vgg19": "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}


def make_vgg(name: str, num_channels: int = 3) -> nn.Module:
    """Convolutions without batch norm and one linear layer, for images of 32 x 32, as in the paper."""
    layers: list[nn.Module] = []
    for word in VGG_LAYERS[name].split():
        if word == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(num_channels, int(word), 3, padding=1), nn.ReLU()]
            num_channels = int(word)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    for module in model:
        if isinstance(module, nn.Conv2d):  # without batch norm, deep ones do not train from PyTorch's own start
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        same = stride == 1 and num_in == num_out
        shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet20(nn.Module):
    """He et al. 2015, sec. 4.2, with 1 x 1 convolutions where the width changes; `width` channels in its first stage."""

    def __init__(self, width: int = 16, num_channels: int = 3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(num_channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, previous = [], width
        for stage in range(3):
            for number in range(3):
                blocks.append(_Block(previous, width << stage, 2 if stage and not number else 1))
                previous = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(previous, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def make_network(name: str, num_channels: int = 3) -> nn.Module:
    """One of the networks by name, from torch's global generator."""
    if name in VGG_LAYERS:
        return make_vgg(name, num_channels)
    if name == "vit":
        return VisionTransformer(192, num_blocks=4, image=(num_channels, 32), patch=4, expansion=4)
    if name.startswith("resnet20"):
        return ResNet20(16 * int(name.partition("x")[2] or 1), num_channels)
    raise ValueError(f"no network is called {name!r}")


def load_images(name: str, split: str) -> Data:
    """All images of "CIFAR-10", or of "MNIST" padded to 32 x 32, with zero mean and unit deviation; float32."""
    images, labels = {"CIFAR-10": datasets.cifar10, "MNIST": datasets.mnist}[name](split)  # type: ignore[arg-type]
    pixels = images.float() / 255
    if name == "MNIST":
        pixels = nn.functional.pad(pixels, (2, 2, 2, 2))
    mean, std = {"CIFAR-10": (0.4734, 0.2516), "MNIST": (0.1001, 0.2752)}[name]
    return Data((pixels - mean) / std, labels)


def trained_network(
    name: str, data_name: str, seed: int, epochs: int, device: str, num_train: int | None = None
) -> nn.Module:
    """A trained network, or what an earlier call with the same arguments has stored under ``experiments-output``."""
    arguments = {"name": name, "data": data_name, "seed": seed, "epochs": epochs, "num_train": num_train}
    path = Path("experiments-output/networks", f"{hashlib.sha256(identify(arguments).encode()).hexdigest()[:16]}.pt")
    torch.manual_seed(seed)
    model = make_network(name, 1 if data_name == "MNIST" else 3).to(device)
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    data = load_images(data_name, "train")
    _train(model, Data(data.x[:num_train], data.y[:num_train]).to(device), epochs, seed, augment=data_name != "MNIST")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save(model.state_dict(), file))
    return model.eval()


def _train(model: nn.Module, data: Data, epochs: int, seed: int, augment: bool, batch: int = 250) -> None:
    """AdamW with warm-up and cosine decay, crops and flips, gradients clipped: the same recipe for every network.

    On a GPU a step is compiled, and captured as a graph.
    """
    on_gpu, device = data.x.is_cuda, data.x.device
    model.train()
    if on_gpu:
        model.to(memory_format=torch.channels_last)
    per_epoch = math.ceil(len(data.x) / batch)
    steps = epochs * per_epoch
    warm = max(1, steps // 10)
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05, fused=on_gpu, capturable=on_gpu)
    generator = torch.Generator(device=device).manual_seed(seed)
    cost = torch.compile(_cost, fullgraph=True, dynamic=False) if on_gpu else _cost

    def step(index: Tensor) -> None:
        optimizer.zero_grad()
        cost(model, data.x[index], data.y[index], augment).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    take_step = CapturedStep(step, on_gpu, device)
    torch.manual_seed(seed)
    order: tuple[Tensor, ...] = ()
    for number in range(steps):
        if number % per_epoch == 0:
            order = torch.randperm(len(data.x), generator=generator, device=device).split(batch)
        rate.fill_(1e-3 * min((number + 1) / warm, 0.5 * (1 + math.cos(math.pi * number / steps))))
        take_step(order[number % len(order)])
    model.to(memory_format=torch.contiguous_format)


def _cost(model: nn.Module, x: Tensor, y: Tensor, augment: bool) -> Tensor:
    """Of a batch; on a GPU in bfloat16."""
    x = _crop_and_flip(x) if augment else x
    x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return nn.functional.cross_entropy(model(x), y)


def _crop_and_flip(x: Tensor) -> Tensor:
    """Every image shifted by up to four pixels and mirrored or not, each on its own."""
    num, _, height, width = x.shape
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    shift = torch.randint(0, 9, (2, num, 1), device=x.device)
    rows = shift[0] + torch.arange(height, device=x.device)
    columns = shift[1] + torch.arange(width, device=x.device)
    columns = torch.where(torch.rand(num, 1, device=x.device) < 0.5, columns.flip(1), columns)
    image = torch.arange(num, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
