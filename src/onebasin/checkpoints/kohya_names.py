"""The names of LoRAs for Stable Diffusion that kohya's scripts write, such as ``lora_unet_mid_block_attentions_0_proj_in``.

The dots in the name of a module are underscores there, and one file holds LoRAs of several networks, told apart by a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from onebasin.symmetries import Symmetry

_KOHYA = re.compile(
    r"(?P<prefix>lora_(?:unet|te\d?|transformer))_(?P<module>\w+)\.(?P<part>lora_down\.weight|lora_up\.weight|alpha)"
)
_PARTS = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
_INNER = "text_model_"
"""In the names of text encoders, but not in those of all versions of transformers."""


@dataclass(frozen=True)
class KohyaNames:
    """How the tensors of a file belong to one network.

    Attributes:
        names: for each tensor that does, its name in PEFT's form.
        left: tensors that stay as they are: factors, and those of other networks.
        other_networks: the prefixes of the latter.
    """

    names: dict[str, str]
    left: tuple[str, ...]
    other_networks: tuple[str, ...]


def is_kohya(names: Iterable[str]) -> bool:
    """Whether all of these are names that kohya's scripts write, and not of factors alone."""
    matches = [_KOHYA.fullmatch(name) for name in names]
    return all(matches) and any(match["part"] != "alpha" for match in matches if match is not None)


def translate_names(symmetry: Symmetry, shapes: Mapping[str, Tensor]) -> KohyaNames:
    """Find which tensors belong to the network that a symmetry is of: those of the prefix whose modules it has, all of them.

    Args:
        symmetry: of the network.
        shapes: the tensors of the file.

    Raises:
        ValueError: if no prefix, or more than one, belongs to the network; if names of modules are alike but for dots.
    """
    modules = _list_modules(symmetry)
    known: dict[str, dict[str, str]] = {}
    unknown: dict[str, str] = {}
    for name, shape in shapes.items():
        match = _KOHYA.fullmatch(name)
        assert match is not None, name
        module = modules.get(match["module"]) or modules.get(match["module"].removeprefix(_INNER))
        found = known.setdefault(match["prefix"], {})
        if match["part"] == "alpha":
            continue
        if module is not None and _fits(symmetry, f"{module}.weight", match["part"], shape):
            found[name] = f"{module}.{_PARTS[match['part']]}"
        else:
            unknown.setdefault(match["prefix"], name)
    own = [prefix for prefix, found in known.items() if found and prefix not in unknown]
    if not own:
        prefix = max(known, key=lambda each: len(known[each]))
        raise ValueError(f"{unknown[prefix]!r} belongs to no weight of its size that the permutation knows")
    if len(own) > 1:
        raise ValueError(
            f"the LoRAs of {' and '.join(own)} both fit the permutation: move them one by one, in files of their own"
        )
    names = known[own[0]]
    return KohyaNames(names, tuple(name for name in shapes if name not in names), tuple(p for p in known if p not in own))


def _list_modules(symmetry: Symmetry) -> dict[str, str]:
    """The modules of a network by their names with underscores."""
    found: dict[str, str] = {}
    for key in symmetry.layouts:
        module, _, last = key.rpartition(".")
        if last == "weight" and found.setdefault(module.replace(".", "_"), module) != module:
            raise ValueError(f"{module!r} and {found[module.replace('.', '_')]!r} have one name in kohya's form")
    return found


def _fits(symmetry: Symmetry, key: str, part: str, shape: Tensor) -> bool:
    layout, axis = symmetry.layouts[key], 1 if part == "lora_down.weight" else 0
    return len(layout) == shape.dim() > 1 and layout[axis].size == shape.shape[axis]
