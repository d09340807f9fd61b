"""From the name of an architecture to a module and example inputs, without a download and without code from a checkpoint."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.symmetries import Symmetry
from onebasin.torch_internals import tree_map
from onebasin.tracing import symmetry as trace

_TYPES = {"float": torch.float32, "long": torch.int64, "int": torch.int32, "bool": torch.bool}
_VERIFIED_UP_TO = 5 * 10**7
"""Parameters. A larger model is traced by shape alone: to verify it, it would have to fit into memory in float64."""
SPECIFICATIONS = "package.module:factory, torchvision:NAME, timm:NAME, or a Hugging Face folder"


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and what to call it with.

    Attributes:
        name: as it was given.
        make: builds the module, with weights of no meaning.
        example_inputs: for `onebasin.symmetry`.
        notes: what a person should know about how it is built.
    """

    name: str
    make: Callable[[], nn.Module]
    example_inputs: Any
    notes: tuple[str, ...] = ()

    def on_meta(self) -> nn.Module:
        """The module without memory; built on the CPU if its constructor needs values."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constructors warn of initialisations that do nothing here
            try:
                with torch.device("meta"):
                    return self.make().eval()
            except Exception:  # of any type: what a constructor does with values is its own affair
                return self.make().eval()

    def shapes(self) -> dict[str, Tensor]:
        """Every key of the state dict as a meta tensor."""
        return {key: value.detach().to("meta") for key, value in self.on_meta().state_dict().items()}

    def symmetry(self, verify: bool | None = None) -> Symmetry:
        """The symmetry; checked on random weights if `verify`, by default for models of up to 50 million parameters."""
        model = self.on_meta()
        if verify is None:
            verify = sum(p.numel() for p in model.parameters()) <= _VERIFIED_UP_TO
        if verify:
            model = self.build()
        inputs = self.example_inputs
        on_meta = any(p.is_meta for p in model.parameters())
        return trace(model, _map(inputs, lambda value: value.to("meta")) if on_meta else inputs, verify=verify)

    def build(self) -> nn.Module:
        """The module on the CPU, in eval mode."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make().eval()


def find_architecture(specification: str, input_shapes: Sequence[str] = (), example_inputs: Any = None) -> Architecture:
    """Read the name of an architecture.

    Args:
        specification: "package.module:factory" (a callable without arguments that returns a module, or a pair of a module
            and example inputs), "torchvision:NAME", "timm:NAME", or a Hugging Face folder, whose configuration is read.
        input_shapes: of the example inputs, such as "1,3,224,224", "1,8:long" or "input_ids=1,8:long"; not needed where
            they are known.
        example_inputs: where they are neither given as shapes nor known.

    Raises:
        ValueError: if there is no such thing, or the example inputs are not known.
    """
    given = read_inputs(input_shapes) if input_shapes else None
    notes: tuple[str, ...] = ()
    package, colon, name = specification.partition(":")
    if Path(specification).is_dir() or Path(specification).name == "config.json":
        make, known, notes = _from_folder(Path(specification))
    elif colon and name and package == "torchvision":
        make, known = _from_torchvision(name)
    elif colon and name and package == "timm":
        make, known = _from_timm(name)
    elif colon and name:
        make, known = _from_factory(package, name)
    else:
        raise ValueError(f"there is no model {specification!r}: give {SPECIFICATIONS}")
    inputs = next((inputs for inputs in (given, known, example_inputs) if inputs is not None), None)
    if inputs is None:
        raise ValueError(f"the example inputs of {specification} are not known: give --input-shape, such as 1,3,224,224")
    return Architecture(specification, make, inputs, notes)


def read_inputs(shapes: Sequence[str]) -> Any:
    """Example inputs of given shapes: normal numbers, and zeros where they are integers.

    >>> {name: tuple(value.shape) for name, value in read_inputs(["ids=1,8:long", "mask=1,8:bool"]).items()}
    {'ids': (1, 8), 'mask': (1, 8)}
    """
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[str, Tensor]] = []
    for text in shapes:
        match = re.fullmatch(r"(?:(\w+)=)?([1-9]\d*(?:[,x][1-9]\d*)*)(?::(\w+))?", text.replace(" ", ""))
        kind = _TYPES.get(match[3] or "float") if match else None
        if match is None or kind is None:
            raise ValueError(
                f"cannot read the input shape {text!r}: write 1,3,224,224, or 1,8:long, or input_ids=1,8:long "
                f"(types: {', '.join(_TYPES)})"
            )
        size = [int(n) for n in re.split("[,x]", match[2])]
        value = torch.randn(size, generator=generator) if kind.is_floating_point else torch.zeros(size, dtype=kind)
        found.append((match[1] or "", value))
    if any(name for name, _ in found):
        if not all(name for name, _ in found):
            raise ValueError("name all of the inputs or none of them")
        return dict(found)
    return tuple(value for _, value in found)


def import_object(package: str, name: str) -> Any:
    """What ``package:name`` stands for; the working folder is looked into as well.

    Raises:
        ValueError: if it cannot be imported.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(package)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(f"cannot import {package}:{name}: {type(error).__name__}: {reason}") from error
    return found


def _from_factory(package: str, name: str) -> tuple[Callable[[], nn.Module], Any]:
    factory = import_object(package, name)
    if not callable(factory):
        raise ValueError(f"{package}:{name} is a {type(factory).__name__}, not a callable that makes a module")

    def call() -> tuple[nn.Module, Any]:
        try:
            made = factory()
        except Exception as error:
            if _on_meta():  # tried again with memory
                raise
            what = "cannot be called without arguments" if isinstance(error, TypeError) else "failed"
            raise ValueError(f"{package}:{name} {what}: {type(error).__name__}: {error}") from error
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{package}:{name} returned a {type(model).__name__}, not a torch.nn.Module")
        return model, inputs

    return lambda: call()[0], call()[1]


def _on_meta() -> bool:
    return torch.empty(0).is_meta


def _from_torchvision(name: str) -> tuple[Callable[[], nn.Module], Any]:
    models = _import_extra("torchvision.models", "vision")
    if name not in models.list_models():
        raise ValueError(f"torchvision has no model {name!r}{_nearest(name, models.list_models())}")
    side = 299 if name == "inception_v3" else 224
    return lambda: models.get_model(name, weights=None), torch.randn(1, 3, side, side)


def _from_timm(name: str) -> tuple[Callable[[], nn.Module], Any]:
    timm = _import_extra("timm", "timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{_nearest(name, timm.list_models())}")
    shape = getattr(timm.get_pretrained_cfg(name), "input_size", (3, 224, 224))
    return lambda: timm.create_model(name, pretrained=False), torch.randn(1, *shape)


def _from_folder(path: Path) -> tuple[Callable[[], nn.Module], Any, tuple[str, ...]]:
    file = path if path.name == "config.json" else path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: give the architecture with --model ({SPECIFICATIONS})")
    try:
        content = json.loads(file.read_text())
        assert isinstance(content, dict)
    except (ValueError, OSError, AssertionError, RecursionError):
        raise ValueError(f"{file} is not a configuration, or it is damaged") from None
    if content.get("auto_map"):
        raise ValueError(f"the architecture in {file} is code in that folder, which is never run: give --model")
    if importlib.util.find_spec("torchvision") is not None:
        _import_extra("torchvision", "vision")  # transformers imports it where it is there, and fails in other words
    transformers = _import_extra("transformers", "hf")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if content.get("model_type") not in known:
        raise ValueError(f"transformers does not know the model type {content.get('model_type')!r} of {file}")
    try:
        config = known[content["model_type"]].from_dict(content)
        notes = _turn_off_cache(config)
        names = content.get("architectures") or []
        found = getattr(transformers, str(names[0]), None) if names else None
        make = transformers.AutoModel.from_config if found is None else found._from_config
        architecture = Architecture(str(path), lambda: make(config), None)
        model = architecture.on_meta()
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"transformers cannot build the model of {file}: {reason}") from error
    return architecture.make, _inputs_of(model, config), notes


def _turn_off_cache(config: Any) -> tuple[str, ...]:
    """A cache that is filled is a further output, which cannot be traced, or whose axes would have to stay."""
    parts = {id(part): part for part in (config, config.get_text_config(), config.get_text_config(decoder=True))}
    caching = [part for part in parts.values() if getattr(part, "use_cache", False)]
    for part in caching:
        part.use_cache = False
    return ("traced with use_cache=False: a cache among the outputs would pin what is in it",) if caching else ()


def _inputs_of(model: Any, config: Any) -> Any:
    """What the main input of a Hugging Face model looks like, if it is text or images."""
    tokens = torch.arange(8).remainder(int(getattr(config.get_text_config(), "vocab_size", 0) or 8)).unsqueeze(0)
    if model.main_input_name == "input_ids":
        decoder = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
        return {"input_ids": tokens, **decoder}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {"pixel_values": torch.randn(1, getattr(config, "num_channels", 3), config.image_size, config.image_size)}
    return None


def _import_extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # torchvision's wheel of the wrong kind fails with a RuntimeError
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install 'onebasin[{extra}]'") from error
        raise ValueError(f"{package} is installed but cannot be imported, perhaps it does not fit torch: {error}") from error


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _map(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(lambda value: function(value) if isinstance(value, Tensor) else value, inputs)
