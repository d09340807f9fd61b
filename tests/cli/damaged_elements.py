"""Damaged permutations and transforms: safetensors files whose metadata describes a symmetry."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import onebasin as ob

Entries = dict[str, Any]
Damage = Callable[[Entries, dict[str, Tensor]], None]


def write_transform(folder: Path) -> None:
    """n.safetensors, a small network, and t.safetensors, a transform of it with a scale and a change of basis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    symmetry = ob.symmetry(model, torch.zeros(1, 3), kinds="all")
    save_file(model.state_dict(), folder / "n.safetensors")
    ob.Transform.random(symmetry, torch.Generator().manual_seed(0)).save(folder / "t.safetensors")


def rewrite(source: Path, target: Path, damage: Damage) -> None:
    with safe_open(source, framework="pt") as file:
        header = {key: json.loads(value) for key, value in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(header, tensors)
    metadata = {
        key: value if isinstance(value, str) and key == "raw" else json.dumps(value) for key, value in header.items()
    }
    save_file({name: value.contiguous() for name, value in tensors.items()}, target, metadata=metadata)


def entry(name: str, value: Any) -> Damage:
    return lambda header, tensors: header.update({name: value})


def without(name: str) -> Damage:
    def damage(header: Entries, tensors: dict[str, Tensor]) -> None:
        del header[name]

    return damage


def inside(name: str, key: Any, value: Any) -> Damage:
    def damage(header: Entries, tensors: dict[str, Tensor]) -> None:
        header[name][key] = value

    return damage


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda header, tensors: tensors.update({name: change(tensors[name])})


def lose(name: str) -> Damage:
    def damage(header: Entries, tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return damage


def add(name: str, value: Tensor) -> Damage:
    return lambda header, tensors: tensors.update({name: value})


def at(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values.view(-1)[index] = value
        return values

    return change


DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
COMMON: dict[str, Damage] = {
    "no format": without("format"),
    "another format": entry("format", "onebasin permutation 2"),
    "format as a list": entry("format", ["onebasin permutation 1"]),
    "format with a control": entry("format", "\x1b[2J" * 20),
    "a long format": entry("format", "x" * 5000),
    "metadata that is no JSON": entry("raw", "{"),
    "no groups": without("groups"),
    "groups as a number": entry("groups", 3),
    "groups as a dict": entry("groups", {"1.weight": 12}),
    "groups in part": entry("groups", [["1.weight"]]),
    "no group at all": entry("groups", []),
    "a group below zero": inside("groups", 0, ["1.weight", -12, []]),
    "a group of nothing": inside("groups", 0, ["1.weight", 0, []]),
    "a group of text": inside("groups", 0, ["1.weight", "12", []]),
    "a group with a point": inside("groups", 0, ["1.weight", 12.5, []]),
    "a group beyond memory": inside("groups", 0, ["1.weight", 2**60, []]),
    "a group in itself": inside("groups", 0, ["1.weight", 12, ["1.weight"]]),
    "a group in nothing": inside("groups", 0, ["1.weight", 12, ["none"]]),
    "a group that is null": inside("groups", 0, None),
    "deep groups": entry("groups", DEEP),
    "no sizes": without("sizes"),
    "sizes as a list": entry("sizes", [12, 12]),
    "sizes as text": entry("sizes", {"1.weight": "many", "3.weight": "many"}),
    "no layouts": without("layouts"),
    "layouts as a list": entry("layouts", ["1.weight 64"]),
    "layouts as numbers": entry("layouts", {"1.weight": 64}),
    "layouts of nothing": entry("layouts", {}),
    "a layout that cannot be read": inside("layouts", "1.weight", "((("),
    "a layout with code": inside("layouts", "1.weight", "__import__('os').system('touch executed')"),
    "a layout of another shape": inside("layouts", "1.weight", "7 7 7"),
    "a layout below zero": inside("layouts", "1.weight", "-12 64"),
    "a layout beyond memory": inside("layouts", "1.weight", f"{2**62} {2**62}"),
    "a layout that is long": inside("layouts", "1.weight", "(" * 3000 + "1.weight" + ")" * 3000),
    "a layout of another model": entry("layouts", {"w": "1.weight 2", "v": "3.weight 2"}),
    "no ties": without("ties"),
    "ties as a number": entry("ties", 3),
    "ties of nothing": entry("ties", [["none", "nothing"]]),
    "unreached tensors that are not there": entry("unreached", ["none"]),
    "a tensor more": add("odd", torch.zeros(3)),
}
PERMUTATIONS: dict[str, Damage] = COMMON | {
    "no index": lose("1.weight"),
    "an index of another shape": tensor("1.weight", lambda value: value[:5]),
    "an index of two axes": tensor("1.weight", lambda value: value.view(3, 4)),
    "a unit twice": tensor("1.weight", lambda value: torch.zeros_like(value)),
    "a unit below zero": tensor("1.weight", at(0, -1)),
    "a unit that is not there": tensor("1.weight", at(0, 12)),
    "a unit beyond 32 bits": tensor("1.weight", at(0, 2**40)),
    "an index of floats": tensor("1.weight", lambda value: value.double() + 0.5),
    "an index of NaN": tensor("1.weight", lambda value: torch.full((12,), torch.nan)),
    "an index of flags": tensor("1.weight", lambda value: value > 3),
}
TRANSFORMS: dict[str, Damage] = {
    "no scales": without("scales"),
    "scales as a number": entry("scales", 3),
    "scales in part": entry("scales", [["0.weight"]]),
    "a scale of no group": inside("scales", 0, ["0.weight", "none", {}, {}]),
    "a scale of no tensor": inside("scales", 0, ["0.weight", "0.weight", {"none": [[0, 0, 1]]}, {}]),
    "a scale of no axis": inside("scales", 0, ["0.weight", "0.weight", {"0.weight": [[9, 0, 1]]}, {}]),
    "a scale of an axis below zero": inside("scales", 0, ["0.weight", "0.weight", {"0.weight": [[-5, 0, 1]]}, {}]),
    "a power of text": inside("scales", 0, ["0.weight", "0.weight", {"0.weight": [[0, 0, "x"]]}, {}]),
    "a power of infinity": inside("scales", 0, ["0.weight", "0.weight", {"0.weight": [[0, 0, 1e999]]}, {}]),
    "bases as a number": entry("bases", 3),
    "a basis of no kind": inside("bases", 0, ["2.weight", "2.weight", "magic", {}, []]),
    "a basis of no group": inside("bases", 0, ["2.weight", "none", "linear", {}, []]),
    "a basis of no tensor": inside("bases", 0, ["2.weight", "2.weight", "linear", {"none": [[0, 0, False]]}, []]),
    "a basis of no axis": inside("bases", 0, ["2.weight", "2.weight", "linear", {"2.weight": [[9, 0, False]]}, []]),
    "fixed as a list": entry("fixed", [1]),
    "fixed as text": entry("fixed", {"0.weight": "one"}),
    "no index": lose("index:0.weight"),
    "a unit twice": tensor("index:0.weight", lambda value: torch.zeros_like(value)),
    "a scale of NaN": tensor("log:0.weight", lambda value: value * torch.nan),
    "a scale of infinity": tensor("log:0.weight", lambda value: value + torch.inf),
    "a scale of another shape": tensor("log:0.weight", lambda value: value[:2]),
    "a scale of nothing": add("log:none", torch.zeros(4)),
    "a matrix of zeros": tensor("matrix:2.weight", lambda value: value * 0),
    "a matrix of NaN": tensor("matrix:2.weight", lambda value: value * torch.nan),
    "a matrix of another shape": tensor("matrix:2.weight", lambda value: value[:2]),
    "a matrix of nothing": add("matrix:none", torch.eye(4)),
    "a matrix of flags": tensor("matrix:2.weight", lambda value: value > 0),
    "a tensor of no kind": add("odd:0.weight", torch.zeros(4)),
    "a tensor without a name": add("", torch.zeros(4)),
}
