"""Where modules come from: a function of the user, torchvision, timm, or the configuration in a Hugging Face folder."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from onebasin.checkpoints.checkpoint import take_part
from onebasin.checkpoints.configuration_sizes import check_entries, check_sizes
from onebasin.checkpoints.diffusers_models import CLASS_ENTRY, PipelineModel, fill_in, find_class, make_inputs
from onebasin.checkpoints.example_inputs import make_example_inputs
from onebasin.checkpoints.pipeline_parts import Part, find_parts, is_pipeline
from onebasin.checkpoints.plain_configurations import make_plain, offline
from onebasin.tensors.files import read_json

SPECIFICATIONS = "package.module:factory, torchvision:NAME, timm:NAME, or a Hugging Face folder"


class Factory(NamedTuple):
    """How to build a module.

    Attributes:
        make: builds it.
        example_inputs: what to call it with, if that is known.
        notes: remarks for the user about how it is built.
    """

    make: Callable[[], nn.Module]
    example_inputs: Any
    notes: tuple[str, ...] = ()


def build_on_cpu(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in eval mode, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructors warn about initialisations that have no effect on the meta device
        return make().eval()


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in eval mode, without memory for its weights; on the CPU if its constructor needs their values."""
    try:
        with torch.device("meta"):
            return build_on_cpu(make)
    except Exception:  # a constructor may fail in any way if tensors have no values
        return build_on_cpu(make)


def build_hollow(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in eval mode, on the CPU, whose parameters take no memory: each repeats a few random numbers.

    Buffers have their values. Types narrower than float32 are widened: some CPUs cannot run them.
    """
    metas: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by identity, for parameters that are registered twice

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            return None
        if id(parameter) not in metas:
            metas[id(parameter)] = parameter, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return metas[id(parameter)][1]

    hook = register_module_parameter_registration_hook(empty)
    try:
        module = build_on_cpu(make)
    except Exception:  # a constructor may fail in any way if tensors have no values
        module = None
    finally:
        hook.remove()
    if module is None or any(buffer.is_meta for buffer in module.buffers()):
        module = build_on_cpu(make)
    generator = torch.Generator().manual_seed(0)
    hollow: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in hollow:
                hollow[id(parameter)] = nn.Parameter(_repeat_numbers(parameter, generator), parameter.requires_grad)
            setattr(part, name, hollow[id(parameter)])
    for tensor in module.buffers():
        if tensor.is_floating_point() and tensor.itemsize < 4:
            tensor.data = tensor.data.float()
    return module


def _repeat_numbers(like: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of a shape and type that has no number in one place only: entries whose indices have one sum are equal."""
    dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else like.dtype
    numbers = torch.randn(sum(like.shape) - like.dim() + 1 if like.numel() else 0, generator=generator)
    return (numbers / max(1, like.shape[1:].numel()) ** 0.5).to(dtype).as_strided(like.shape, (1,) * like.dim())


def find_factory(specification: str, tensors: Mapping[str, Tensor] | None = None) -> Factory:
    """The factory that a specification names.

    Args:
        specification: see `onebasin.checkpoints.find_architecture`.
        tensors: of the checkpoint, if there is one, on the meta device: a configuration that says more is refused.

    Raises:
        ValueError: if there is none, or it cannot be used.
    """
    package, _, name = specification.partition(":")
    if Path(specification).is_dir() or Path(specification).name == "config.json":
        return _find_in_folder(Path(specification), tensors)
    if not name:
        raise ValueError(f"there is no model {specification!r}: give {SPECIFICATIONS}")
    if package in ("torchvision", "timm"):
        return _find_in_torchvision(name) if package == "torchvision" else _find_in_timm(name)
    return _find_function(package, name)


def import_object(package: str, name: str) -> Any:
    """The object ``package:name``. Modules in the working folder are found as well, unless an installed one has the name.

    Raises:
        ValueError: if it cannot be imported.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # at the end: a file there must not take the place of a library
    try:
        found: Any = importlib.import_module(package)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        hint = _explain_hidden(package.partition(".")[0])
        raise ValueError(f"cannot import {package}:{name}: {describe_call_error(error)}{hint}") from error
    return found


def _explain_hidden(module: str) -> str:
    """That a module of the working folder is not found because of an installed one, or nothing."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    for own in (Path(f"{module}.py"), Path(module, "__init__.py")):
        if own.is_file() and loaded is not None and not own.samefile(loaded):
            return f" ({loaded} comes before {own} in the working folder: rename that)"
    return ""


def describe_call_error(error: BaseException) -> str:
    """What code of the user raised, on one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {_first_line(error)}"


def _find_function(package: str, name: str) -> Factory:
    """A function of the user that returns a module, or a pair of a module and example inputs."""
    factory = import_object(package, name)
    if not callable(factory):
        raise ValueError(f"{package}:{name} is a {type(factory).__name__}, not a callable that makes a module")

    def call() -> tuple[nn.Module, Any]:
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            if isinstance(error, Exception) and torch.empty(0).is_meta:
                raise  # `build_on_meta` catches it and tries again with memory
            what = "cannot be called without arguments" if isinstance(error, TypeError) else "failed"
            raise ValueError(f"{package}:{name} {what}: {describe_call_error(error)}") from error
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{package}:{name} returned a {type(model).__name__}, not a torch.nn.Module")
        return model, inputs

    return Factory(lambda: call()[0], call()[1])


def _find_in_torchvision(name: str) -> Factory:
    models = _import_extra("torchvision.models", "vision")
    if name not in models.list_models():
        raise ValueError(f"torchvision has no model {name!r}{_nearest(name, models.list_models())}")
    side = 299 if name == "inception_v3" else 224
    return Factory(lambda: models.get_model(name, weights=None), torch.randn(1, 3, side, side))


def _find_in_timm(name: str) -> Factory:
    timm = _import_extra("timm", "timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{_nearest(name, timm.list_models())}")
    shape = getattr(timm.get_pretrained_cfg(name), "input_size", (3, 224, 224))
    return Factory(lambda: timm.create_model(name, pretrained=False), torch.randn(1, *shape))


def _find_in_folder(path: Path, tensors: Mapping[str, Tensor] | None) -> Factory:
    """The model that a Hugging Face configuration describes, or those of a pipeline. No code from the folder is run."""
    if is_pipeline(path):
        return _find_pipeline(path, tensors)
    file = path if path.name == "config.json" else path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: give the architecture with --model ({SPECIFICATIONS})")
    return find_configured(read_configuration(file), file, tensors)


def find_configured(content: dict[str, Any], file: Path, tensors: Mapping[str, Tensor] | None = None) -> Factory:
    """The factory of the model that a configuration describes.

    Args:
        content: of the configuration.
        file: it is from, for messages.
        tensors: of the checkpoint, see `find_factory`.

    Raises:
        ValueError: if it cannot be built.
    """
    content = make_plain(content, file)
    check_sizes(content, file, tensors)
    if importlib.util.find_spec("torchvision") is not None:
        _import_extra("torchvision", "vision")  # transformers imports it if it is installed; our message is clearer
    if CLASS_ENTRY in content:
        return _find_in_diffusers(content, file, tensors)
    transformers = _import_extra("transformers", "hf")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if content.get("model_type") not in known:
        raise ValueError(f"transformers does not know the model type {content.get('model_type')!r} of {file}")
    try:
        config = known[content["model_type"]].from_dict(content)
        notes = _turn_off_cache(config)
        names = content.get("architectures") or []
        kind = getattr(transformers, str(names[0]), None) if names else None
        start = transformers.AutoModel.from_config if kind is None else kind._from_config

        def build() -> nn.Module:
            with offline():
                return start(config)

        model = build_on_meta(build)
    except Exception as error:
        raise ValueError(f"transformers cannot build the model of {file}: {_first_line(error)}") from error
    check_entries(model, file, tensors)
    return Factory(build, make_example_inputs(model, config), notes)


def read_configuration(file: Path) -> dict[str, Any]:
    """The content of a ``config.json``.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        content = read_json(file)
        assert isinstance(content, dict)
    except (ValueError, OSError, AssertionError):
        raise ValueError(f"{file} is not a configuration, or it is damaged") from None
    return content


def _find_in_diffusers(content: dict[str, Any], file: Path, tensors: Mapping[str, Tensor] | None) -> Factory:
    """The model of diffusers that a configuration describes, if its class is known."""
    library = _import_extra("diffusers", "diffusers")
    try:
        kind = find_class(library, content[CLASS_ENTRY])
        config = fill_in(content, kind)

        def build() -> nn.Module:
            with offline():
                return kind.from_config(config)

        model = build_on_meta(build)
        check_entries(model, file, tensors)
        return Factory(build, make_inputs(model))
    except Exception as error:
        raise ValueError(f"the model of {file} cannot be built: {_first_line(error)}") from error


def _find_pipeline(path: Path, tensors: Mapping[str, Tensor] | None) -> Factory:
    """The models of a pipeline as one network; each is called by itself."""
    found: dict[str, Factory] = {}
    for name, part in find_parts(path).items():
        if not part.is_moved:
            continue
        _check_class(path / name / "config.json", part)
        found[name] = _find_in_folder(path / name, None if tensors is None else take_part(tensors, name))
        if found[name].example_inputs is None:
            raise ValueError(f"the example inputs of the part {path / name} are not known: align the other parts one by one")
    return Factory(
        lambda: PipelineModel({name: factory.make() for name, factory in found.items()}),
        [{name: factory.example_inputs} for name, factory in found.items()],
        tuple(f"{name}: {note}" for name, factory in found.items() for note in factory.notes),
    )


def _check_class(file: Path, part: Part) -> None:
    """Refuse a part whose own configuration is of another class than its pipeline says."""
    content = read_configuration(file) if file.is_file() else {}
    names = content.get("architectures") if part.library == "transformers" else [content.get(CLASS_ENTRY)]
    if names != [part.class_name]:
        raise ValueError(f"{file.parent} should be of the class {part.class_name}, but its configuration does not say so")


def _turn_off_cache(config: Any) -> tuple[str, ...]:
    """A cache is a further output of the model: it cannot be traced, or its axes would be pinned."""
    parts = {id(part): part for part in (config, config.get_text_config(), config.get_text_config(decoder=True))}
    caching = [part for part in parts.values() if getattr(part, "use_cache", False)]
    for part in caching:
        part.use_cache = False
    return ("traced with use_cache=False: a cache among the outputs would pin what is in it",) if caching else ()


def _import_extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a wheel of torchvision that does not fit torch raises RuntimeError
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install 'onebasin[{extra}]'") from error
        raise ValueError(f"{package} is installed but cannot be imported, perhaps it does not fit torch: {error}") from error


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
