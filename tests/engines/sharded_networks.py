"""Small networks in shards, as large ones are stored: a chain of layers, and a permuted, noisy copy of it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import onebasin as ob
from onebasin.checkpoints import Checkpoint, open_checkpoint

DEPTH, WIDTH = 11, 12


def axes() -> dict[str, str]:
    """A residual stream of s units, and h units in each of its blocks: more tensors than are combined at a time."""
    found = {"embed.weight": "v s", "head.weight": "o s"}
    for number in range(DEPTH):
        found |= {f"{number}.up.weight": f"h{number} s", f"{number}.down.weight": f"s h{number}"}
    return found


def make_symmetry() -> ob.Symmetry:
    return ob.Symmetry.from_axes(axes(), free=["s", *(f"h{number}" for number in range(DEPTH))])


def make_states(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"v": 20, "o": 7, "s": WIDTH}
    first = {
        key: torch.randn([shapes.get(axis, 9) for axis in layout.split()], generator=generator)
        for key, layout in axes().items()
    }
    moved = make_symmetry().bind(first).random(generator).apply(first)
    return first, {key: value + 0.3 * torch.randn(value.shape, generator=generator) for key, value in moved.items()}


def write_shards(folder: Path, state: dict[str, torch.Tensor], num_shards: int = 4) -> Checkpoint:
    folder.mkdir()
    keys = list(state)
    names = {key: f"model-{number % num_shards + 1}.safetensors" for number, key in enumerate(keys)}
    for name in set(names.values()):
        save_file({key: state[key] for key in keys if names[key] == name}, folder / name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return open_checkpoint(folder)
