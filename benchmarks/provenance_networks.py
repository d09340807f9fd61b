"""Small networks of five families, trained in seconds, and what is done to a network that others are derived from."""

from __future__ import annotations

import copy
import functools
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

import onebasin as ob
from benchmarks.digits import VisionTransformer
from experiments.transformer_networks import Recipe, Transformer, loss
from onebasin.cli.digits_demo import make_mlp
from onebasin.datasets import digits

Data = tuple[Tensor, Tensor]
_CONTEXT = 32


def _make_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 64, 10))


def _make_language_model(kind: str) -> nn.Module:
    hidden = 192 if kind == "gpt" else 128
    model = Transformer(Recipe(kind, 48, 2, 4, hidden, context=_CONTEXT, dropout=0.0))
    num_tokens = len(_read_text()[0])
    model.embed, model.head = nn.Embedding(num_tokens, 48), nn.Linear(48, num_tokens, bias=False)
    nn.init.normal_(model.embed.weight, std=0.02)
    nn.init.normal_(model.head.weight, std=0.02)
    return model


@functools.cache
def _read_text() -> tuple[list[str], Tensor]:
    """The characters of Tiny Shakespeare, and the text as their numbers."""
    path = Path(os.environ.get("ONEBASIN_DATA", ".")) / "tinyshakespeare" / "input.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    return characters, torch.tensor([numbers[character] for character in text])


@dataclass(frozen=True)
class Family:
    """A kind of network, and how it is trained."""

    make: Callable[[], nn.Module]
    steps: int
    rate: float = 2e-3
    weight_decay: float = 0.01


FORGETFUL = "MLP that forgets its start"
"""Its weight decay leaves exp(-6) of what it started from: beyond the assumptions of the residual test."""
FAMILIES = {
    "MLP": Family(lambda: make_mlp(128), 600),
    "CNN with batch norm": Family(_make_cnn, 300),
    "ViT": Family(lambda: VisionTransformer(32, 2, expansion=4), 400),
    "GPT-2-like": Family(lambda: _make_language_model("gpt"), 400),
    "Llama-like": Family(lambda: _make_language_model("llama"), 400),
    FORGETFUL: Family(lambda: make_mlp(128), 6000, weight_decay=1.0),
}


def read_data(family: str, other: bool = False) -> Data:
    """What a family is trained on; or another task: inverted digits of other classes, text from right to left."""
    if "like" not in family:
        images, labels = digits("train")
        return (1 - images, (7 * labels + 3) % 10) if other else (images, labels)
    tokens = _read_text()[1]
    tokens = tokens.flip(0) if other else tokens
    count = (len(tokens) - 1) // _CONTEXT
    return tokens[: count * _CONTEXT].view(count, _CONTEXT), tokens[1 : count * _CONTEXT + 1].view(count, _CONTEXT)


def example(family: str) -> Tensor:
    """To trace a network with."""
    return read_data(family)[0][:2]


def _fit(parameters: list[Tensor], predict: Callable[[Tensor], Tensor], data: Data, seed: int, family: Family) -> None:
    generator, steps = torch.Generator().manual_seed(seed), family.steps
    optimizer = torch.optim.AdamW(parameters, family.rate, weight_decay=family.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        index = torch.randint(len(data[0]), (64 if data[0].is_floating_point() else 16,), generator=generator)
        optimizer.zero_grad()
        loss(predict(data[0][index]), data[1][index]).backward()
        optimizer.step()
        schedule.step()


def train(family: str, seed: int) -> nn.Module:
    """From a random start of its own."""
    torch.manual_seed(seed)
    model = FAMILIES[family].make().train()
    _fit(list(model.parameters()), model, read_data(family), seed, FAMILIES[family])
    return model.eval()


def fine_tune(family: str, model: nn.Module, seed: int) -> nn.Module:
    """All parameters, on the other task, for half as many steps at half the rate."""
    tuned, recipe = copy.deepcopy(model).train(), FAMILIES[family]
    recipe = replace(recipe, steps=recipe.steps // 2, rate=recipe.rate / 2)
    _fit(list(tuned.parameters()), tuned, read_data(family, True), seed, recipe)
    return tuned.eval()


def add_lora(family: str, model: nn.Module, seed: int, rank: int = 4) -> nn.Module:
    """A low-rank change of every matrix, trained on the other task, merged in."""
    torch.manual_seed(seed)
    frozen = {key: value.detach() for key, value in model.named_parameters()}
    factors = {
        key: (torch.zeros(len(value), rank, requires_grad=True),
              (0.1 * torch.randn(rank, value[0].numel())).requires_grad_())
        for key, value in frozen.items() if value.dim() > 1
    }  # fmt: skip

    def merged() -> dict[str, Tensor]:
        changes = {key: (left @ right).view_as(frozen[key]) for key, (left, right) in factors.items()}
        return {key: value + changes[key] if key in changes else value for key, value in frozen.items()}

    leaves = [factor for pair in factors.values() for factor in pair]
    recipe = replace(FAMILIES[family], steps=FAMILIES[family].steps // 2)
    _fit(leaves, lambda x: functional_call(model, merged(), (x,)), read_data(family, True), seed, recipe)
    with torch.no_grad():
        return _load(model, merged())


def _load(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    result = copy.deepcopy(model)
    result.load_state_dict({**model.state_dict(), **state})
    return result


def prune(model: nn.Module) -> nn.Module:
    """The smaller half of every matrix is zero."""
    state = model.state_dict()
    return _load(model, {k: torch.where(v.abs() < v.abs().median(), 0.0, v) for k, v in state.items() if v.dim() > 1})


def quantise(model: nn.Module) -> nn.Module:
    """Every matrix in 255 steps."""
    steps = {key: value.abs().max() / 127 for key, value in model.state_dict().items() if value.dim() > 1}
    return _load(model, {key: (model.state_dict()[key] / step).round() * step for key, step in steps.items()})


def average(model: nn.Module, stranger: nn.Module) -> nn.Module:
    """Half and half, as they are."""
    return _load(model, dict(ob.interpolate([model.state_dict(), stranger.state_dict()], [0.5, 0.5])))


class Symmetries:
    """Of all networks of a family, traced once: with gains of norms as they are, and in canonical form."""

    def __init__(self, model: nn.Module, inputs: Tensor):
        self.inputs = inputs
        self.given = ob.symmetry(model, inputs, kinds="all")
        self.canonical = ob.symmetry(self.fold(model), inputs, kinds="all")

    def fold(self, model: nn.Module) -> nn.Module:
        """In canonical form."""
        return _load(model, ob.canonical(model, self.inputs, self.given).state)

    def move(self, model: nn.Module, seed: int, kinds: str = "all") -> nn.Module:
        """By a random element: a "permutation", "scales" alone, or "all" kinds; the latter two in canonical form."""
        transform = ob.Transform.random(self.canonical, torch.Generator().manual_seed(seed))
        if kinds == "permutation":
            return _load(model, transform.permutation.apply(model))
        if kinds == "scales":
            transform = ob.Transform(self.canonical.identity(), transform.logarithms)
        return _load(model, transform.apply(self.fold(model)))
