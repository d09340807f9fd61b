"""Make docs/api.md from the signatures and docstrings of the public names.

python -m docs.make_api
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, is_typeddict

PAGE = Path(__file__).parent / "api.md"
_PROPERTIES = (property, functools.cached_property)
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Symmetry and permutation": {
        "onebasin": ["symmetry", "Symmetry", "Group", "Permutation", "Scale", "Basis", "Transform", "UnreachedWarning"],
        "onebasin.symmetries": ["GroupElement"],
    },
    "Alignment": {
        "onebasin": [
            *("align", "Alignment", "merge", "Objective", "WeightDistance", "Midpoint", "RandomPoint", "RebasinNet"),
            *("synthetic_data", "synthetic_images", "synthetic_text", "mean_scores", "canonical", "CanonicalForm"),
            *("widen", "port", "Ported", "Imitation", "provenance", "Provenance"),
        ],
    },
    "Methods and their options": {
        "onebasin": ["Sinkhorn", "WeightMatching", "ActivationMatching", "StraightThrough", "Exchange", "Scaling"],
    },
    "Operators": {"onebasin": ["sinkhorn", "assign", "AssignmentInfo"]},
    "Between models": {
        "onebasin": [
            *("interpolate", "linear_path", "LinearPath", "loss_plane", "Plane", "mean_loss", "repair", "reset_batch_norm"),
        ],
        "onebasin.tensors": ["find_layer_distances", "LayerDistance"],
    },
    "Pictures and reports": {
        "onebasin.plots": ["plot_path", "plot_paths", "plot_history", "plot_permutation", "plot_plane", "plot_accuracies"],
        "onebasin.reporting": ["Report", "render"],
    },
    "Checkpoints": {
        "onebasin.checkpoints": [
            *("open_checkpoint", "open_models", "write_checkpoint", "find_architecture", "fit_names"),
            *("move_adapter", "move_optimizer"),
        ],
        "onebasin.tensors": ["LazyState"],
        "onebasin.engines": ["make_engine"],
    },
    "Data": {"onebasin.datasets": ["digits", "mnist", "cifar10", "cifar100"]},
    "Continual learning": {
        "onebasin.continual": [
            *("RebasinStrategy", "Finetune", "Replay", "EWC", "LwF", "AGEM", "DERPlusPlus", "Joint"),
            *("MCSGD", "StableSGD", "CLeWI", "Strategy", "Training"),
            *("run_stream", "learn_stream", "interleave", "AccuracyMatrix", "accuracy", "sgd", "adam"),
            *("Stream", "Task", "rotated", "split", "rotate", "hold_out"),
            *("rotated_digits", "split_digits", "rotated_mnist", "split_cifar100"),
        ],
    },
}
INHERITING = ("Symmetry", "LazyState")
"""Classes that have members for users from bases without a page."""
INTERNAL = {
    *("Symmetry.rounding", "Symmetry.change", "Symmetry.row_keys", "Symmetry.warn_of_unreached"),
    *("WeightDistance.sums", "RebasinNet.unstack", "LazyState.lazily"),
}
"""Members that other modules of the library call, and that it does not promise to users."""
_HEADING = re.compile(r"(Args|Attributes|Returns|Raises|Warns|Yields):")
_WIDTH = 100


def render() -> str:
    """The whole page."""
    lines = ["# API reference", "", "Made by `python -m docs.make_api` from the docstrings.", ""]
    for title, modules in SECTIONS.items():
        links = [_link(name, thing) for module in modules for name, thing in _named(module, modules[module])]
        lines.append(f"- {title}: {', '.join(links)}")
    for title, modules in SECTIONS.items():
        lines += ["", f"## {title}"]
        for module, names in modules.items():
            if module != "onebasin":
                lines += ["", f"In `{module}`."]
            for name, thing in _named(module, names):
                lines += _entry(name, thing)
    return "\n".join(lines) + "\n"


def _named(module: str, names: list[str]) -> list[tuple[str, Any]]:
    return [(name, getattr(importlib.import_module(module), name)) for name in names]


def _link(name: str, thing: Any) -> str:
    return f"[`{name}`](#{'class-' if inspect.isclass(thing) else ''}{name.lower()})"


def _entry(name: str, thing: Any) -> list[str]:
    kind = "class " if inspect.isclass(thing) else ""  # so that Symmetry and symmetry have different anchors
    lines = ["", f"### {kind}`{name}`", "", *_signature(name, thing), "", *_translate(thing)]
    if inspect.isclass(thing):
        described = {}
        for owner in (thing, *find_hidden_bases(thing)):
            described |= {member: value for member, value in vars(owner).items() if member not in described}
        for member, value in described.items():
            is_promised = not member.startswith("_") and f"{name}.{member}" not in INTERNAL
            if is_promised and _is_documented(value) and not _is_inherited(thing, member):
                lines += _member(f"{name}.{member}", value)
    return lines


def find_hidden_bases(thing: type) -> list[type]:
    """Classes of ours above one of `INHERITING`: what they define is described with it."""
    return [base for base in thing.__mro__[1:] if _is_ours(base)] if thing.__name__ in INHERITING else []


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("onebasin")


def _is_inherited(owner: type, member: str) -> bool:
    """Whether a class above it, one of ours, has the member already: there it is described."""
    hidden = find_hidden_bases(owner)
    return any(hasattr(base, member) for base in owner.__mro__[1:] if _is_ours(base) and base not in hidden)


_PROPERTIES = (property, functools.cached_property)


def _is_documented(value: Any) -> bool:
    plain = inspect.isfunction(value) or isinstance(value, (*_PROPERTIES, classmethod, staticmethod))
    return plain and bool(inspect.getdoc(value))


def _member(name: str, value: Any) -> list[str]:
    function = getattr(value, "__func__", value)
    signature = [] if isinstance(value, _PROPERTIES) else ["", *_signature(name, function)]
    return ["", f"#### `{name}`", *signature, "", *_translate(function)]


def _signature(name: str, function: Any) -> list[str]:
    """A call on one line if it fits, else one line an argument."""
    returned = ""
    if inspect.isclass(function) and issubclass(function, BaseException):
        return []
    if is_typeddict(function):
        pieces = [f"{key}=..." for key in function.__annotations__]
    else:
        signature = inspect.signature(function)
        pieces = [_parameter(p) for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if signature.return_annotation not in (inspect.Signature.empty, "None", None):
            returned = f" -> {_annotation(signature.return_annotation)}"
    one_line = f"{name}({', '.join(pieces)}){returned}"
    if len(one_line) <= _WIDTH:
        return ["```", one_line, "```"]
    return ["```", f"{name}(", *(f"    {piece}," for piece in pieces), f"){returned}", "```"]


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = star + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        default = parameter.default
        plain = not re.search(r"factory| object at 0x", repr(default))
        shown = getattr(default, "__name__", repr(default)) if plain else "..."
        text += f" = {shown}" if ":" in text else f"={shown}"
    return text


def _annotation(annotation: Any) -> str:
    """As it was written: an annotation that is not a string is printed with the full names of its modules."""
    if isinstance(annotation, str):
        return annotation
    text = inspect.formatannotation(annotation).replace("torch.nn.modules.module.", "nn.")
    text = re.sub(r"\*<class '([\w.]+)'>", r"Unpack[\1]", text)
    return re.sub(r"\b(?:[a-z_]\w+\.){1,}(?=[A-Z])", lambda match: "nn." if match[0] == "nn." else "", text)


def _translate(thing: Any) -> list[str]:
    """A docstring in Google's style as Markdown."""
    lines: list[str] = []
    section = ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        heading = _HEADING.fullmatch(line)
        if heading:
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section in ("Args", "Attributes", "Raises", "Warns") and re.match(r" {4}\S", line):
            name, _, text = line.strip().partition(": ")
            lines.append(f"- `{name}`: {text}")
        elif section:
            lines.append("  " + line.strip() if section != "Returns" and line.strip() else line.strip())
        else:
            lines.append(line)
    return _fence(lines)


def _fence(lines: list[str]) -> list[str]:
    """Put examples between fences; an example ends with an empty line."""
    result: list[str] = []
    inside = False
    for line in [*lines, ""]:
        if line.startswith(">>>") and not inside:
            result.append("```pycon")
            inside = True
        elif inside and not line:
            result.append("```")
            inside = False
        result.append(line)
    while result and not result[-1]:
        result.pop()
    return result


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
