"""From tensors as transformers saves them to those of its modules, by its own map: other names, experts in one stack.

Since version 5, ``save_pretrained`` writes some models under other names than their modules have, and ``from_pretrained``
reads them back by the same map. Tensors that are only renamed are read one by one. Those that are stacked or split are
converted together; numbered entries show that the conversion only rearranges, and lead back from the model to the file.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.checkpoints.checkpoint import Checkpoint, Conversion, join_parts, split_parts
from onebasin.checkpoints.diffusers_models import PipelineModel
from onebasin.checkpoints.factories import build_on_cpu, build_on_meta
from onebasin.checkpoints.tensor_names import fit_names
from onebasin.tensors.states import RowReader, find_ties

_Shapes = tuple[torch.Size, ...]
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by their bytes: entries of any type are moved as integers."""


def fit_to_model(
    checkpoint: Checkpoint,
    make: Callable[[], nn.Module],
    ignore: Collection[str] = (),
    partial: bool = False,
    apart: Collection[str] = (),
) -> Checkpoint:
    """The same checkpoint under the names of a model: converted as transformers does, then as `fit_names` does.

    Args:
        checkpoint: under the names in its files.
        make: builds the model.
        ignore: shell patterns for tensors that the model does not have. They stay as they are.
        partial: allow tensors to be missing, as in a task vector.
        apart: names of tensors that the model does not have, and that the caller takes care of.

    Raises:
        ValueError: naming the first tensor that does not fit.
    """
    model = build_on_meta(make)
    if isinstance(model, PipelineModel):
        ignore = [*ignore, *(f"{name}.*" for name in checkpoint.layout.parts if not hasattr(model, name))]
    converted = convert_names(checkpoint, model, ignore)
    unsaved = [key for key in list_unsaved(model) if key not in converted]
    made = build_on_cpu(make).state_dict() if unsaved else {}
    defaults = {key: made[key] for key in unsaved}
    return fit_names(converted, model.state_dict(), find_ties(model), ignore, partial, apart, defaults)


def convert_names(checkpoint: Checkpoint, model: nn.Module, ignore: Collection[str] = ()) -> Checkpoint:
    """The same checkpoint under the names of a model of transformers, stacked as the model has its tensors.

    Names that transformers does not convert, or not to one of the model's, stay as they are. So do all names for a model of
    another library.

    Args:
        checkpoint: under the names in its files.
        model: the model; on the meta device will do.
        ignore: shell patterns for names to leave as they are.

    Raises:
        ValueError: if tensors cannot be converted, or not without changing numbers.
    """
    if isinstance(model, PipelineModel):
        parts = split_parts(checkpoint)
        for name, part in model.named_children():
            own = [pattern.removeprefix(f"{name}.") for pattern in ignore if pattern.startswith((f"{name}.", "*"))]
            parts |= {name: convert_names(parts[name], part, own)} if name in parts else {}
        return join_parts(checkpoint.layout, parts)
    if not is_pretrained_model(model):
        return checkpoint
    names = [name for name in checkpoint if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)]
    plain, groups = _plan(names, model)
    if not groups and all(name == key for name, key in plain.items()):
        return checkpoint
    plain |= {name: name for name in checkpoint if name not in names}
    renamed: dict[str, list[str]] = {}
    for name, key in plain.items():
        renamed.setdefault(key, []).append(name)
    conversions = [_copy_to_all(checkpoint, key, found) for key, found in renamed.items() if len(found) > 1]
    conversions += list(_convert_groups(checkpoint, groups, model))
    return _apply(checkpoint, {key: found[0] for key, found in renamed.items() if len(found) == 1}, tuple(conversions))


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether a module is one of transformers' own."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def list_unsaved(model: nn.Module) -> list[str]:
    """The tensors that a model of transformers makes itself and does not save, such as sinusoids of positions."""
    if isinstance(model, PipelineModel):
        return [f"{name}.{key}" for name, part in model.named_children() for key in list_unsaved(part)]
    unsaved: Any = model._keys_to_ignore_on_save if is_pretrained_model(model) else ()
    return [key for key in model.state_dict() if key in (unsaved or ())]


@dataclass
class _Group:
    """Tensors in files that one converter of transformers takes together, and the pattern that each of them matched."""

    key: str
    converter: Any
    patterns: dict[str, str] = field(default_factory=dict)

    def run(self, model: nn.Module, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of the model, by their names."""
        converter = copy.deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.patterns.items(), tensors, strict=True):
            converter.add_tensor(self.key, name, pattern, tensor)
        found = converter.convert(self.key, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _plan(names: Sequence[str], model: nn.Module) -> tuple[dict[str, str], list[_Group]]:
    """For each name the key that transformers gives it, and the tensors that it converts together."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)  # pyright: ignore
    renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = model.state_dict().keys()
    plain: dict[str, str] = {}
    groups: dict[str, _Group] = {}
    # The order of loading: some renamings depend on what came before, and experts are stacked in it.
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        key, pattern = core_model_loading.rename_source_key(name, renamings, converters)
        if key not in known:
            plain[name] = name
        elif pattern is None:
            plain[name] = key
        else:
            group = groups.setdefault(key, _Group(key, by_pattern[pattern]))
            group.patterns[name] = pattern
    return plain, list(groups.values())


def _apply(checkpoint: Checkpoint, names: dict[str, str], conversions: tuple[Conversion, ...]) -> Checkpoint:
    """The checkpoint with some tensors renamed and others converted."""
    shapes = {key: checkpoint.shapes[name] for key, name in names.items()}
    sources: dict[str, tuple[Conversion, int]] = {}
    for conversion in conversions:
        made = conversion.convert([checkpoint.shapes[name] for name in conversion.names])
        for number, (key, shape) in enumerate(zip(conversion.keys, made, strict=True)):
            if key in shapes:
                raise ValueError(f"{checkpoint.path} holds {key!r} twice, the second time as {conversion.names[0]!r}")
            shapes[key], sources[key] = shape, (conversion, number)

    read = _ConvertedReader(checkpoint, names, sources)
    return Checkpoint(shapes, read, checkpoint.layout, names, checkpoint.notes, checkpoint.original, conversions)


@dataclass(frozen=True)
class _ConvertedReader(RowReader):
    checkpoint: Checkpoint
    names: Mapping[str, str]
    sources: Mapping[str, tuple[Conversion, int]]

    def __call__(self, key: str) -> Tensor:
        if key in self.names:
            return self.checkpoint[self.names[key]]
        conversion, number = self.sources[key]
        return conversion.convert([self.checkpoint[name] for name in conversion.names])[number]

    def has_rows(self, key: str) -> bool:
        return key in self.names and self.checkpoint.has_rows(self.names[key])

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read_rows(self.names[key], start, stop)

    def find_origin(self, key: str) -> str:
        return self.checkpoint.find_origin(self.names[key]) if key in self.names else key


def _copy_to_all(checkpoint: Checkpoint, key: str, names: Sequence[str]) -> Conversion:
    """Several tensors in the files that the model keeps once: they must be equal, and all are written."""
    first, *others = names
    for other in others:
        if not torch.equal(checkpoint[first], checkpoint[other]):
            raise ValueError(f"{first!r} and {other!r} in {checkpoint.path} are one tensor of the model, but differ")
    return Conversion(tuple(names), (key,), _take_first, functools.partial(_repeat_first, len(names)))


def _take_first(found: Sequence[Tensor]) -> list[Tensor]:
    return [found[0]]


def _repeat_first(count: int, made: Sequence[Tensor]) -> list[Tensor]:
    return [made[0]] * count


def _convert_groups(checkpoint: Checkpoint, groups: Sequence[_Group], model: nn.Module) -> Iterator[Conversion]:
    """A conversion for each group. Of groups that are alike, as in every layer, one is tried out."""
    tried: set[Any] = set()
    for group in groups:
        names = tuple(group.patterns)
        shapes = tuple(checkpoint.shapes[name].shape for name in names)
        if len({checkpoint.shapes[name].dtype for name in names}) > 1:
            raise ValueError(
                f"{names[0]!r} and others in {checkpoint.path} are one tensor of the model, but of several types"
            )
        alike = (id(group.converter), *group.patterns.values(), shapes)
        try:
            keys = tuple(group.run(model, [torch.empty(shape, device="meta") for shape in shapes]))
            if alike not in tried:
                _number_entries(group, model, shapes)
        except Exception as error:  # of an operation of transformers, whatever it is
            raise ValueError(
                f"{names[0]!r} in {checkpoint.path} and {len(names) - 1} others cannot be converted to the model's "
                f"{group.key!r} and back: {error}"
            ) from error
        tried.add(alike)
        convert, restore = _make_functions(group, model, shapes)
        yield Conversion(names, keys, convert, restore)


def _number_entries(group: _Group, model: nn.Module, shapes: _Shapes) -> list[Tensor]:
    """For each entry of the model's tensors, the number of the entry in the files that it comes from.

    Raises:
        ValueError: if not every entry in the files becomes exactly one of the model.
    """
    total = sum(map(math.prod, shapes))
    kind = torch.int32 if total < 2**31 else torch.int64
    made = list(group.run(model, _cut(torch.arange(total, dtype=kind), shapes)).values())
    seen = torch.zeros(total, dtype=torch.bool)
    for numbers in made:
        if numbers.dtype != kind or not bool(((numbers >= 0) & (numbers < total)).all()):
            raise ValueError("transformers computes with its numbers")
        seen[numbers.reshape(-1)] = True
    if sum(numbers.numel() for numbers in made) != total or not bool(seen.all()):
        raise ValueError("transformers leaves out or repeats some of its numbers")
    return made


def _make_functions(
    group: _Group, model: nn.Module, shapes: _Shapes
) -> tuple[Callable[[Sequence[Tensor]], list[Tensor]], Callable[[Sequence[Tensor]], list[Tensor]]]:
    return functools.partial(_convert, group, model), functools.partial(_restore, group, model, shapes)


def _convert(group: _Group, model: nn.Module, found: Sequence[Tensor]) -> list[Tensor]:
    return list(group.run(model, found).values())


def _restore(group: _Group, model: nn.Module, shapes: _Shapes, made: Sequence[Tensor]) -> list[Tensor]:
    flat = torch.empty(sum(map(math.prod, shapes)), dtype=_SAME_SIZE[made[0].itemsize])
    for numbers, value in zip(_number_entries(group, model, shapes), made, strict=True):
        flat[numbers.reshape(-1)] = value.detach().cpu().contiguous().reshape(-1).view(flat.dtype)
    return _cut(flat.view(made[0].dtype), shapes)


def _cut(flat: Tensor, shapes: _Shapes) -> list[Tensor]:
    """A row of entries, cut into tensors of given shapes."""
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    return [flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
