"""Small transformers by the recipes of GLMC (NeurIPS 2025), and their training: a ViT on CIFAR-10, two language models.

The ViT reads patches of 4 x 4 pixels, has learned positions and averages its tokens. The language models read Tiny
Shakespeare in a byte-level BPE of 1,024 tokens that is trained on its training part; "gpt" has layer norms and learned
positions, "llama" RMS norms, rotary positions, grouped queries and SwiGLU. Both start as GPT-2 does; heads are not tied to
embeddings. On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.anchor_networks import augment
from experiments.frame import identify
from onebasin import datasets
from onebasin.tensors.files import write_atomically


@dataclass(frozen=True)
class Recipe:
    """A network and how it is trained: AdamW, warm-up over a twentieth of the steps, then half a cosine.

    Attributes:
        network: "vit", "vit-100" (for the classes of CIFAR-100), "gpt" or "llama".
        width: of the residual stream.
        num_blocks: attention and MLP each.
        num_heads: of attention; "llama" has half as many for keys and values.
        hidden: units of an MLP.
        steps: of the optimiser.
        batch: images, or pieces of text.
        rate: the highest.
        weight_decay: of AdamW.
        dropout: in train mode.
        context: tokens of a piece of text.
        patience: stop after so many looks at the validation loss, 50 steps apart, without a new lowest one, and go back to
            that one; 0 to take all steps.
    """

    network: str
    width: int = 256
    num_blocks: int = 6
    num_heads: int = 8
    hidden: int = 512
    steps: int = 58_500
    batch: int = 128
    rate: float = 3e-4
    weight_decay: float = 1e-3
    dropout: float = 0.1
    context: int = 256
    patience: int = 0


RECIPES = {
    "vit": Recipe("vit", dropout=0.2),
    "gpt": Recipe("gpt", num_heads=4, hidden=1024, steps=5000, batch=32, weight_decay=0.01, patience=5),
    "llama": Recipe("llama", num_heads=4, hidden=704, steps=5000, batch=32, weight_decay=0.01, patience=5),
}
"""Of the text, 5,000 steps are 100 epochs."""
VOCABULARY = 1024
NUM_CLASSES = {"vit": 10, "vit-100": 100}
"""Of networks that read images."""
_STEPS_BETWEEN_LOOKS = 50
_MEAN, _STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
"""Of the channels of CIFAR-10, from 0 to 255."""


class Attention(nn.Module):
    """Self-attention; causal, with rotary positions and grouped queries if asked for."""

    def __init__(self, width: int, num_heads: int, num_kv: int, causal: bool, rotary: bool, bias: bool, dropout: float):
        super().__init__()
        self.num_heads, self.num_kv, self.causal, self.rotary = num_heads, num_kv, causal, rotary
        size = width // num_heads
        self.q, self.o = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, num_kv * size, bias=bias) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        batch, length, width = x.shape
        size = width // self.num_heads
        q = self.q(x).view(batch, length, self.num_heads, size).transpose(1, 2)
        k, v = (f(x).view(batch, length, self.num_kv, size).transpose(1, 2) for f in (self.k, self.v))
        if self.rotary:
            q, k = turn(q), turn(k)
        if self.num_kv < self.num_heads:
            shape = (batch, self.num_kv, self.num_heads // self.num_kv, length, size)
            k, v = (value.unsqueeze(2).expand(shape).reshape(batch, self.num_heads, length, size) for value in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.dropout(self.o(mixed.transpose(1, 2).reshape(batch, length, width)))


def turn(x: Tensor) -> Tensor:
    """Rotary positions: pairs of units half a head apart, turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class MLP(nn.Module):
    """GELU between two layers."""

    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        return self.dropout(self.second(F.gelu(self.first(x))))


class SwiGLU(nn.Module):
    """A gate times a branch."""

    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(hidden, width, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Transformer(nn.Module):
    """Blocks with norms in front of attention and MLP, between an embedding and a head."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.reads_images = recipe.network in NUM_CLASSES
        is_llama = recipe.network == "llama"
        width, dropout = recipe.width, recipe.dropout
        if self.reads_images:
            self.embed: nn.Module = nn.Conv2d(3, width, 4, 4)
        else:
            self.embed = nn.Embedding(VOCABULARY, width)
        length = 64 if self.reads_images else recipe.context
        self.positions = None if is_llama else nn.Parameter(0.02 * torch.randn(length, width))
        make_norm: Callable[[], nn.Module] = (lambda: nn.RMSNorm(width)) if is_llama else (lambda: nn.LayerNorm(width))
        make_mlp = SwiGLU if is_llama else MLP
        num_kv = recipe.num_heads // 2 if is_llama else recipe.num_heads
        heads = (recipe.num_heads, num_kv, not self.reads_images, is_llama, not is_llama, dropout)
        self.mixers = nn.ModuleList(Attention(width, *heads) for _ in range(recipe.num_blocks))
        self.mlps = nn.ModuleList(make_mlp(width, recipe.hidden, dropout) for _ in range(recipe.num_blocks))
        self.norms = nn.ModuleList(make_norm() for _ in range(2 * recipe.num_blocks))
        num_outputs = NUM_CLASSES.get(recipe.network, VOCABULARY)
        self.last, self.head = make_norm(), nn.Linear(width, num_outputs, bias=self.reads_images)
        self.dropout = nn.Dropout(dropout)
        for module in () if self.reads_images else self.modules():  # as GPT-2 starts
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images to class scores, or tokens to the scores of the tokens that follow."""
        x = self.embed(x)
        if self.reads_images:
            x = x.flatten(2).transpose(1, 2)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        x = self.dropout(x)
        for number, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * number](x))
            x = x + mlp(self.norms[2 * number + 1](x))
        x = self.last(x)
        return self.head(x.mean(1) if self.reads_images else x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, over all positions of a text."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def load_data(network: str, split: str, device: str, context: int = 256) -> tuple[Tensor, Tensor]:
    """CIFAR-10 or CIFAR-100, scaled alike; or pieces of text, and the tokens that follow each of theirs."""
    if network in NUM_CLASSES:
        images, labels = (datasets.cifar10 if network == "vit" else datasets.cifar100)(split)  # type: ignore[arg-type]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
        return ((images.float() - mean) / std).to(device), labels.to(device)
    tokens = _encode()[split].to(device)
    count = (len(tokens) - 1) // context
    pieces = [tokens[start : start + count * context].view(count, context) for start in (0, 1)]
    return pieces[0], pieces[1]


def _encode() -> dict[str, Tensor]:
    """The tokens of Tiny Shakespeare: nine tenths for training, a twentieth to stop by, and the last one for tests."""
    folder = Path(os.environ.get("ONEBASIN_DATA", "."))
    stored = Path("experiments-output/shakespeare.json")
    if not stored.is_file():
        from tokenizers import ByteLevelBPETokenizer

        text = gzip.decompress((folder / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode()
        cuts = int(0.9 * len(text)), int(0.95 * len(text))
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text[: cuts[0]]], vocab_size=VOCABULARY)
        parts = {"train": text[: cuts[0]], "validation": text[cuts[0] : cuts[1]], "test": text[cuts[1] :]}
        stored.parent.mkdir(parents=True, exist_ok=True)
        found = {name: tokenizer.encode(part).ids for name, part in parts.items()}
        write_atomically(stored, lambda path: path.write_text(json.dumps(found)))
    return {name: torch.tensor(ids) for name, ids in json.loads(stored.read_text()).items()}


class Training:
    """One network on its way; a step needs nothing from the host, so that a CUDA graph can hold it."""

    def __init__(self, recipe: Recipe, seed: int, data: tuple[Tensor, Tensor]):
        torch.manual_seed(seed)
        self.recipe, (self.inputs, self.targets) = recipe, data
        self.lowest, self.looks_since = math.inf, 0
        self.best: dict[str, Tensor] = {}
        device = self.inputs.device
        self.on_gpu = device.type == "cuda"
        self.model = Transformer(recipe).to(device).train()
        warm = recipe.steps / 20
        self.rates = torch.tensor(
            [recipe.rate * min((n + 1) / warm, (1 + math.cos(math.pi * n / recipe.steps)) / 2) for n in range(recipe.steps)],
            device=device,
        )
        self.rate, self.position = torch.zeros((), device=device), torch.zeros(1, dtype=torch.long, device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.rate, weight_decay=recipe.weight_decay, fused=self.on_gpu, capturable=self.on_gpu
        )
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None

    def step(self) -> None:
        """One step of AdamW on a batch that is drawn at random."""
        self.rate.copy_(self.rates[self.position].squeeze(0))
        self.position += 1
        index = torch.randint(0, len(self.inputs), (self.recipe.batch,), device=self.inputs.device)
        cost = (_compiled_cost if self.on_gpu else _cost)(self.model, self.inputs[index], self.targets[index])
        self.optimizer.zero_grad(set_to_none=True)
        cost.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def look(self, inputs: Tensor, targets: Tensor) -> None:
        """At the validation loss; keep the parameters if it is the lowest so far."""
        cost = float(loss(self.model.eval()(inputs), targets))
        self.model.train()
        self.looks_since += 1
        if cost < self.lowest:
            self.lowest, self.looks_since = cost, 0
            self.best = {key: value.clone() for key, value in self.model.state_dict().items()}

    @property
    def is_finished(self) -> bool:
        """Whether the validation loss falls no more."""
        return 0 < self.recipe.patience <= self.looks_since

    def make_replay(self) -> Callable[[], None]:
        """A step as a graph; on the CPU the step itself."""
        if self.stream is None:
            return self.step
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self.step()
            self.position.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.step()
        return graph.replay


def _cost(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of a batch, images augmented anew; on a GPU in bfloat16."""
    x = jitter(augment(inputs)) if inputs.is_floating_point() else inputs
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        return loss(model(x), targets)


_compiled_cost = torch.compile(_cost, fullgraph=True, dynamic=False)


def jitter(images: Tensor) -> Tensor:
    """Each image with a brightness, contrast and saturation changed by up to 0.4, and a hue by up to a tenth of a turn."""
    *factors, turn_by = 2 * torch.rand(4, len(images), 1, 1, device=images.device) - 1
    brightness, contrast, saturation = (1 + 0.4 * factor for factor in factors)
    # Channel by channel with plain numbers: a CUDA graph cannot copy constants from the host.
    colours = [(x * std + mean) / 255 * brightness for x, mean, std in zip(images.unbind(1), _MEAN, _STD, strict=True)]
    colours = [x.clamp(0, 1) for x in colours]
    grey = _lightness(*colours).mean((1, 2), keepdim=True)
    colours = [(grey + (x - grey) * contrast).clamp(0, 1) for x in colours]
    grey = _lightness(*colours)
    red, green, blue = ((grey + (x - grey) * saturation).clamp(0, 1) for x in colours)
    # Two channels of colour whose angle is the hue, as in YIQ.
    y = _lightness(red, green, blue)
    i, q = 0.596 * red - 0.274 * green - 0.322 * blue, 0.211 * red - 0.523 * green + 0.312 * blue
    cos, sin = (f(0.2 * math.pi * turn_by) for f in (torch.cos, torch.sin))
    i, q = i * cos - q * sin, i * sin + q * cos
    colours = [y + 0.956 * i + 0.619 * q, y - 0.272 * i - 0.647 * q, y - 1.106 * i + 1.703 * q]
    changed = zip(colours, _MEAN, _STD, strict=True)
    return torch.stack([(255 * x.clamp(0, 1) - mean) / std for x, mean, std in changed], 1)


def _lightness(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    return 0.299 * red + 0.587 * green + 0.114 * blue


def train_side_by_side(recipe: Recipe, seeds: Sequence[int], data: tuple[Tensor, Tensor]) -> list[nn.Module]:
    """Networks of one recipe, one per seed, in eval mode; on a GPU each on a stream of its own."""
    runs = [Training(recipe, seed, data) for seed in seeds]
    replays = [run.make_replay() for run in runs]
    looked_at = load_data(recipe.network, "validation", str(data[0].device), recipe.context) if recipe.patience else ()
    for number in range(1, recipe.steps + 1):
        for run, replay in zip(runs, replays, strict=True):
            if run.is_finished:
                continue
            with torch.cuda.stream(run.stream):
                replay()
                if looked_at and number % _STEPS_BETWEEN_LOOKS == 0:
                    run.look(*looked_at)
        if all(run.is_finished for run in runs):
            break
    if data[0].is_cuda:
        torch.cuda.synchronize()
    for run in runs:
        if run.best:
            run.model.load_state_dict(run.best)
    return [run.model.eval() for run in runs]


def trained_networks(
    recipe: Recipe, seeds: Sequence[int], device: str, data: tuple[Tensor, Tensor] | None = None, about: str = ""
) -> list[nn.Module]:
    """`train_side_by_side`, or what an earlier call with the same arguments has stored under ``experiments-output``.

    Args:
        recipe: of the networks.
        seeds: one for each network.
        device: to train on.
        data: to train on, if not the training split of the recipe.
        about: what that data is, if it is given.
    """
    paths = {}
    for seed in seeds:
        described = identify({**asdict(recipe), "seed": seed, **({"data": about} if data is not None else {})})
        paths[seed] = Path("experiments-output/transformers", f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.pt")
    missing = [seed for seed in seeds if not paths[seed].is_file()]
    if missing:
        data = data or load_data(recipe.network, "train", device, recipe.context)
        for seed, model in zip(missing, train_side_by_side(recipe, missing, data), strict=True):
            paths[seed].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(paths[seed], lambda path, model=model: torch.save(model.state_dict(), path))
    models = []
    for seed in seeds:
        model = Transformer(recipe).to(device)
        model.load_state_dict(torch.load(paths[seed], map_location=device, weights_only=True))
        models.append(model.eval())
    return models
