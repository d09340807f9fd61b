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
_PIPELINE_PARTS = {
    "lora_unet": "unet", "lora_transformer": "transformer", "lora_te": "text_encoder", "lora_te1": "text_encoder",
    "lora_te2": "text_encoder_2", "lora_te3": "text_encoder_3",
}  # fmt: skip
"""The networks of a pipeline that the prefixes stand for."""
_INNER = "text_model_"
"""In the names of text encoders, but not in those of all versions of transformers."""


@dataclass(frozen=True)
class KohyaNames:
    """How the tensors of a file belong to one network, or to the networks of a pipeline.

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

    Of a pipeline, those of each prefix that stands for one of its networks belong to it.

    Args:
        symmetry: of the network, or of all networks of a pipeline.
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
        module = _find_module(modules, match["prefix"], match["module"])
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
    if len(own) > 1 and not _are_apart({prefix: known[prefix] for prefix in own}):
        raise ValueError(
            f"the LoRAs of {' and '.join(own)} both fit the permutation: move them one by one, in files of their own"
        )
    names = {name: new for prefix in own for name, new in known[prefix].items()}
    return KohyaNames(names, tuple(name for name in shapes if name not in names), tuple(p for p in known if p not in own))


def _find_module(modules: Mapping[str, str], prefix: str, name: str) -> str | None:
    """The module that a name with underscores stands for: of the network, or of its part that the prefix stands for."""
    names = (name, name.removeprefix(_INNER))
    names = (*names, *(f"{_PIPELINE_PARTS.get(prefix)}_{each}" for each in names))
    return next((modules[each] for each in names if each in modules), None)


def _are_apart(found: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the LoRAs of several prefixes are of different parts of a pipeline."""
    parts = [{name.partition(".")[0] for name in names.values()} for names in found.values()]
    return parts == [{_PIPELINE_PARTS.get(prefix)} for prefix in found] and len(set().union(*parts)) == len(parts)


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
